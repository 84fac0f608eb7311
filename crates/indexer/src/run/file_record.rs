//! The record of a file that an earlier run has read, and the lookup of records in path order.

use crate::failure::Failure;
use crate::source::content::Content;
use crate::source::pin::origin_pin;
use fletch_tables::PinRow;
use std::cmp::Ordering;

/// One file as an earlier run read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRecord {
    /// How the object looked.
    pub pin: PinRow,
    /// The hashes of its bytes.
    pub content: Content,
    /// How the object looked when a server found the same bytes under another entity tag.
    pub renewed: Option<PinRow>,
}

impl FileRecord {
    /// Returns a record that no server renewed.
    #[must_use]
    pub fn new(pin: PinRow, content: Content) -> Self {
        FileRecord { pin, content, renewed: None }
    }

    /// Returns whether an object of a store that looks like `now` has the bytes of the record.
    #[must_use]
    pub fn proves(&self, now: &PinRow) -> bool {
        let now = origin_pin(now);
        let mut pins = std::iter::once(&self.pin).chain(&self.renewed);
        pins.any(|pin| origin_pin(pin).proves_same(&now))
    }
}

/// The records of an earlier run, in path order: a journal or a parent.
pub trait Earlier: Send {
    /// The record of one path.
    type Record;

    /// Returns the next path and its record; `None` at the end.
    ///
    /// # Errors
    /// [`Failure`] when the earlier run's journal or tables cannot be read.
    fn next(&mut self) -> Result<Option<(String, Self::Record)>, Failure>;
}

/// Looks up paths in an [`Earlier`]. Callers ask for paths in ascending order.
pub struct Lookup<R> {
    earlier: Box<dyn Earlier<Record = R>>,
    head: Option<(String, R)>,
    started: bool,
}

impl<R> Lookup<R> {
    /// Begins before the first record.
    #[must_use]
    pub fn new(earlier: Box<dyn Earlier<Record = R>>) -> Self {
        Lookup { earlier, head: None, started: false }
    }

    /// Returns the record of `path`, if there is one.
    ///
    /// # Errors
    /// [`Failure`] when the earlier run's journal or tables cannot be read.
    pub fn find(&mut self, path: &str) -> Result<Option<R>, Failure> {
        if !self.started {
            self.started = true;
            self.head = self.earlier.next()?;
        }
        while let Some((p, _)) = &self.head {
            match p.as_str().cmp(path) {
                Ordering::Less => self.head = self.earlier.next()?,
                Ordering::Equal => {
                    let found = self.head.take();
                    self.head = self.earlier.next()?;
                    return Ok(found.map(|(_, record)| record));
                }
                Ordering::Greater => return Ok(None),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct List(std::vec::IntoIter<(String, FileRecord)>);
    impl Earlier for List {
        type Record = FileRecord;
        fn next(&mut self) -> Result<Option<(String, FileRecord)>, Failure> {
            Ok(self.0.next())
        }
    }

    #[test]
    fn lookups_merge_two_ascending_sequences() {
        let record = |i: i64| {
            let pin = PinRow { size: 1, mtime_ns: Some(i), etag: Some(format!("2a-{i:x}")) };
            FileRecord::new(pin, Content::whole(fletch_core::Hash::of(&i.to_le_bytes()), 1))
        };
        let list: Vec<_> =
            ["b", "d", "e", "g"].iter().zip(1..).map(|(p, i)| (p.to_string(), record(i))).collect();
        let mut l = Lookup::new(Box::new(List(list.into_iter())));
        let found: Vec<_> =
            ["a", "b", "c", "e", "f", "g", "h"].iter().map(|p| l.find(p).expect("ok")).collect();
        assert_eq!(found, [None, Some(record(1)), None, Some(record(3)), None, Some(record(4)), None]);
    }
}
