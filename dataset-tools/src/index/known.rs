//! What an earlier run already knows of a file, and when that may be believed.

use super::content::Content;
use crate::failure::Failure;
use fletch_origin::Pin;
use fletch_tables::PinRow;
use std::cmp::Ordering;
use std::fs::Metadata;

/// A file is believed unchanged only if its times lie this long before the run that read it:
/// a later change within the clock's step would not show. Nanoseconds.
pub const YOUNG_NS: i128 = 2_000_000_000;

/// One file of an earlier run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// How the object looked when it was read.
    pub pin: PinRow,
    /// Its bytes, named.
    pub content: Content,
}

/// How a local file looks.
#[must_use]
pub fn pin_of(meta: &Metadata) -> PinRow {
    row_of(fletch_origin::local::pin_of(meta))
}

/// A pin as tables keep it.
#[must_use]
pub fn row_of(pin: Pin) -> PinRow {
    PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag }
}

/// A pin as origins take it.
#[must_use]
pub fn pin_from(row: &PinRow) -> Pin {
    Pin { size: row.size, mtime_ns: row.mtime_ns, etag: row.etag.clone() }
}

/// The change time in a local etag (`ino-ctime`, hexadecimal), nanoseconds since 1970.
fn ctime_ns(etag: &str) -> Option<i128> {
    // A time before 1970 reads as one far in the future, which is never believed.
    i128::from_str_radix(etag.split_once('-')?.1, 16).ok()
}

/// Whether a pin taken by a run that began at `indexed_at_ns` tells a later change.
#[must_use]
pub fn trusted(pin: &PinRow, indexed_at_ns: u64, local: bool) -> bool {
    let limit = i128::from(indexed_at_ns) - YOUNG_NS;
    match (pin.mtime_ns, pin.etag.as_deref()) {
        (Some(mtime), Some(etag)) if local => {
            ctime_ns(etag).is_some_and(|ctime| ctime.max(i128::from(mtime)) < limit)
        }
        (_, Some(_)) => !local,
        (Some(mtime), None) => !local && i128::from(mtime) < limit,
        (None, None) => false,
    }
}

/// Files known from earlier, in path order.
pub trait Earlier: Send {
    /// The next file; `None` at the end.
    ///
    /// # Errors
    /// When the earlier run's record cannot be read.
    fn next(&mut self) -> Result<Option<(String, Known)>, Failure>;
}

/// Looks paths up in an [`Earlier`], provided that they come in ascending order.
pub struct Lookup {
    earlier: Box<dyn Earlier>,
    head: Option<(String, Known)>,
    started: bool,
}

impl Lookup {
    /// Begins at the first file.
    #[must_use]
    pub fn new(earlier: Box<dyn Earlier>) -> Self {
        Lookup { earlier, head: None, started: false }
    }

    /// What is known of `path`.
    ///
    /// # Errors
    /// When the earlier run's record cannot be read.
    pub fn find(&mut self, path: &str) -> Result<Option<Known>, Failure> {
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
                    return Ok(found.map(|(_, known)| known));
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

    fn pin(mtime: i64, ctime: i64) -> PinRow {
        PinRow { size: 1, mtime_ns: Some(mtime), etag: Some(format!("2a-{ctime:x}")) }
    }

    #[test]
    fn young_files_are_not_believed() {
        const S: i64 = 1_000_000_000;
        let at = 100 * S.unsigned_abs();
        assert!(trusted(&pin(97 * S, 97 * S), at, true));
        assert!(!trusted(&pin(98 * S, 10 * S), at, true), "mtime 2 s before the run");
        assert!(!trusted(&pin(10 * S, 98 * S), at, true), "ctime 2 s before the run");
        assert!(!trusted(&PinRow { etag: None, ..pin(1, 1) }, at, true));
        assert!(trusted(&PinRow { etag: None, ..pin(1, 1) }, at, false));
        assert!(trusted(&PinRow { mtime_ns: None, ..pin(1, 1) }, at, false));
        assert!(!trusted(&PinRow { size: 1, mtime_ns: None, etag: None }, at, false));
    }

    #[test]
    fn a_pin_of_a_real_file_has_its_change_time() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let meta = file.as_file().metadata().expect("stat");
        let etag = pin_of(&meta).etag.expect("local files have one");
        use std::os::unix::fs::MetadataExt;
        assert_eq!(
            ctime_ns(&etag),
            Some(i128::from(meta.ctime()) * 1_000_000_000 + i128::from(meta.ctime_nsec()))
        );
    }

    struct List(std::vec::IntoIter<(String, Known)>);
    impl Earlier for List {
        fn next(&mut self) -> Result<Option<(String, Known)>, Failure> {
            Ok(self.0.next())
        }
    }

    #[test]
    fn lookups_merge_two_ascending_sequences() {
        let known = |i: i64| Known {
            pin: pin(i, i),
            content: Content::whole(fletch_core::Hash::of(&i.to_le_bytes()), 1),
        };
        let list: Vec<_> =
            ["b", "d", "e", "g"].iter().zip(1..).map(|(p, i)| (p.to_string(), known(i))).collect();
        let mut l = Lookup::new(Box::new(List(list.into_iter())));
        let found: Vec<_> =
            ["a", "b", "c", "e", "f", "g", "h"].iter().map(|p| l.find(p).expect("ok")).collect();
        assert_eq!(found, [None, Some(known(1)), None, Some(known(3)), None, Some(known(4)), None]);
    }
}
