//! Logs of records: every file of a server's state (`docs/FORMATS.md`, "Log").

use super::golden_bytes;
use crate::{plant, repair};
use fletch_core::record;

pub fn seeds() -> Vec<Vec<u8>> {
    let mut made = record::file_header().to_vec();
    record::append(&mut made, 1, b"one");
    record::append(&mut made, 2, &[]);
    vec![golden_bytes("log.bin"), made]
}

/// Reads the input as it is, and again with repaired checksums. What was read is the file's prefix again.
pub fn run(input: &[u8]) -> bool {
    let accepted = reads(input);
    let repaired = repair::log(input);
    assert!(reads(&repaired), "a log with sound checksums is refused");
    accepted
}

fn reads(file: &[u8]) -> bool {
    let Ok((records, len)) = record::read(file) else { return false };
    if len == 0 {
        assert!(records.is_empty());
        return true;
    }
    let mut again = file[..record::FILE_HEADER_BYTES].to_vec();
    for r in &records {
        let begin = again.len();
        record::append(&mut again, r.kind, r.payload);
        // A reader ignores the flags, which the first check covers.
        let flags = file[begin + 5..begin + 16].to_vec();
        again[begin + 5..begin + 16].copy_from_slice(&flags);
    }
    assert_eq!(again, file[..len], "the records are not those of the file");
    plant::bug(records.iter().any(|r| r.kind == 9));
    true
}
