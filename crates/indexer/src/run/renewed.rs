//! Pins that a server renewed: it read every byte of these objects under another entity tag than that of the
//! tables, and found the indexed hashes. So an index need not read them again.

use super::file_record::{Earlier, FileRecord};
use crate::failure::Failure;
use fletch_api::{ObjectPin, RenewedPin};
use fletch_tables::PinRow;
use std::collections::BTreeMap;

/// The pin of the tables and the renewed pin of each object, by path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RenewedPins(BTreeMap<String, (PinRow, PinRow)>);

impl RenewedPins {
    /// Adds a page of a server's list.
    pub fn extend(&mut self, page: Vec<RenewedPin>) {
        let pin = |pin: ObjectPin| PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag };
        self.0.extend(page.into_iter().map(|row| (row.path, (pin(row.old), pin(row.new)))));
    }

    /// Adds the renewed pin to the record of a path, if the record has the pin that was renewed.
    pub fn renew(&self, path: &str, record: &mut FileRecord) {
        if let Some((old, new)) = self.0.get(path)
            && record.pin == *old
            && record.pin.size == new.size
        {
            record.renewed = Some(new.clone());
        }
    }
}

/// The records of a parent, with renewed pins.
pub struct RenewedParent<E> {
    parent: E,
    pins: RenewedPins,
}

impl<E> RenewedParent<E> {
    /// Begins at the next record of `parent`.
    #[must_use]
    pub fn new(parent: E, pins: RenewedPins) -> Self {
        RenewedParent { parent, pins }
    }
}

impl<E: Earlier<Record = FileRecord>> Earlier for RenewedParent<E> {
    type Record = FileRecord;

    fn next(&mut self) -> Result<Option<(String, FileRecord)>, Failure> {
        let next = self.parent.next()?;
        Ok(next.map(|(path, mut record)| {
            self.pins.renew(&path, &mut record);
            (path, record)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::content::Content;
    use fletch_core::Hash;

    struct Parent(Vec<(String, FileRecord)>);
    impl Earlier for Parent {
        type Record = FileRecord;
        fn next(&mut self) -> Result<Option<(String, FileRecord)>, Failure> {
            Ok(self.0.pop())
        }
    }

    #[test]
    fn a_record_is_proven_by_both_its_pins() {
        let pin = |size, tag: &str| PinRow { size, mtime_ns: None, etag: Some(tag.to_owned()) };
        let record = |pin| FileRecord::new(pin, Content::whole(Hash::of(b"x"), 1));
        let api = |size, tag: &str| ObjectPin { size, mtime_ns: None, etag: Some(tag.to_owned()) };
        let row = |path: &str, new| RenewedPin { path: path.to_owned(), old: api(1, "old"), new };
        let mut pins = RenewedPins::default();
        pins.extend(vec![row("a", api(1, "new")), row("b", api(1, "new")), row("c", api(2, "new"))]);
        let records = [("a", "old"), ("b", "other"), ("c", "old"), ("d", "old")];
        let records = records.map(|(path, tag)| (path.to_owned(), record(pin(1, tag))));
        let mut parent = RenewedParent::new(Parent(records.into_iter().rev().collect()), pins);
        for (path, own, is_renewed) in
            [("a", "old", true), ("b", "other", false), ("c", "old", false), ("d", "old", false)]
        {
            let (found, record) = parent.next().expect("a record").expect("not the end");
            assert_eq!((found.as_str(), record.proves(&pin(1, own))), (path, true));
            assert_eq!(record.proves(&pin(1, "new")), is_renewed, "{path}");
            assert!(!record.proves(&pin(2, own)) && !record.proves(&pin(1, "third")), "{path}");
        }
        assert_eq!(parent.next().expect("the end"), None);
    }
}
