//! Pins: how an object looked when it was read, and when an equal pin proves that it is unchanged.

use fletch_origin::Pin;
use fletch_tables::PinRow;
use std::fs::Metadata;

/// How long before a run the times of a file must lie for its pin to prove anything, in nanoseconds. A later
/// change within one step of the file system's clock would not show.
pub const YOUNG_NS: i128 = 2_000_000_000;

/// Returns the pin of a local file.
#[must_use]
pub fn pin_of(meta: &Metadata) -> PinRow {
    pin_row(fletch_origin::local::pin_of(meta))
}

/// Converts the pin of an origin to the pin of the tables.
#[must_use]
pub fn pin_row(pin: Pin) -> PinRow {
    PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag }
}

/// Converts the pin of the tables to the pin of an origin.
#[must_use]
pub fn origin_pin(row: &PinRow) -> Pin {
    Pin { size: row.size, mtime_ns: row.mtime_ns, etag: row.etag.clone() }
}

/// The change time in a local etag (`ino-ctime`, hexadecimal), nanoseconds since 1970.
fn ctime_ns(etag: &str) -> Option<i128> {
    // A time before 1970 parses as a time far in the future, which proves nothing.
    i128::from_str_radix(etag.split_once('-')?.1, 16).ok()
}

/// Whether every later change of the object would have changed this pin. The pin is of a run that began at
/// `indexed_at_ns`, nanoseconds since 1970.
#[must_use]
pub fn proves_unchanged(pin: &PinRow, indexed_at_ns: u64, local: bool) -> bool {
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
        assert!(proves_unchanged(&pin(97 * S, 97 * S), at, true));
        assert!(!proves_unchanged(&pin(98 * S, 10 * S), at, true), "mtime 2 s before the run");
        assert!(!proves_unchanged(&pin(10 * S, 98 * S), at, true), "ctime 2 s before the run");
        assert!(!proves_unchanged(&PinRow { etag: None, ..pin(1, 1) }, at, true));
        assert!(proves_unchanged(&PinRow { etag: None, ..pin(1, 1) }, at, false));
        assert!(proves_unchanged(&PinRow { mtime_ns: None, ..pin(1, 1) }, at, false));
        assert!(!proves_unchanged(&PinRow { size: 1, mtime_ns: None, etag: None }, at, false));
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
}
