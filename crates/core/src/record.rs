//! Records of append-only logs (`docs/FORMATS.md`, "Log"). Each record has checksums and can be skipped, and
//! a reader tells a torn tail from damage.
//!
//! A record is `len u32 · kind u8 · flags u8 · zero u16 · header check 8 · payload check 8 · payload`,
//! little-endian. The checks are the first 8 bytes of BLAKE3 in key-derivation mode. A log file begins with
//! [`FILE_MAGIC`], major u32 and minor u32.

use crate::hash::context;

/// The first bytes of every log file.
pub const FILE_MAGIC: [u8; 8] = *b"FLETCHLG";
/// The length of the file header, in bytes.
pub const FILE_HEADER_BYTES: usize = 16;
/// The bytes of a record before its payload.
pub const RECORD_HEADER_BYTES: usize = 24;
/// The longest payload, in bytes.
pub const PAYLOAD_BYTES_MAX: u32 = 16 << 20;

/// A record that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its kind. Readers skip kinds that they do not know.
    pub kind: u8,
    /// Its payload.
    pub payload: &'a [u8],
}

/// Why a log cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadLog {
    /// The file is not a log of Fletch.
    #[error("not a Fletch log (bad magic)")]
    Magic,
    /// A newer Fletch wrote the log.
    #[error("the log format {0} is newer than this build reads (1); use a newer build")]
    Major(u32),
    /// A record before the end is damaged. The records after it must not be lost silently.
    #[error("the log is damaged at byte {0}")]
    Damaged(usize),
}

/// Returns the header of a new log file of format 1.0.
#[must_use]
pub fn file_header() -> [u8; FILE_HEADER_BYTES] {
    let mut h = [0; FILE_HEADER_BYTES];
    h[..8].copy_from_slice(&FILE_MAGIC);
    h[8] = 1;
    h
}

fn check8(bytes: &[u8]) -> [u8; 8] {
    let mut h = blake3::Hasher::new_derive_key(context::RECORD);
    h.update(bytes);
    let mut out = [0; 8];
    out.copy_from_slice(&h.finalize().as_bytes()[..8]);
    out
}

/// Appends one record.
///
/// # Panics
/// When the payload is longer than [`PAYLOAD_BYTES_MAX`]. The caller splits or rejects it first.
pub fn append(out: &mut Vec<u8>, kind: u8, payload: &[u8]) {
    let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    assert!(len <= PAYLOAD_BYTES_MAX, "record payload too long");
    let mut head = [0u8; 8];
    head[..4].copy_from_slice(&len.to_le_bytes());
    head[4] = kind;
    out.extend_from_slice(&head);
    out.extend_from_slice(&check8(&head));
    out.extend_from_slice(&check8(payload));
    out.extend_from_slice(payload);
}

/// Reads a whole log. Returns its records and the length of the valid prefix.
///
/// A prefix shorter than the file means that a crash tore the last append. The caller truncates the file to
/// it.
///
/// # Errors
/// [`BadLog`]: the log is foreign, newer, or damaged before its end.
pub fn read(file: &[u8]) -> Result<(Vec<Record<'_>>, usize), BadLog> {
    if file.len() < FILE_HEADER_BYTES {
        // A crash tore the first write.
        return if file_header().starts_with(file) { Ok((Vec::new(), 0)) } else { Err(BadLog::Magic) };
    }
    if file[..8] != FILE_MAGIC {
        return Err(BadLog::Magic);
    }
    let major = u32::from_le_bytes([file[8], file[9], file[10], file[11]]);
    if major != 1 {
        return Err(BadLog::Major(major));
    }
    let mut records = Vec::new();
    let mut at = FILE_HEADER_BYTES;
    while at < file.len() {
        let Some(head) = file.get(at..at + RECORD_HEADER_BYTES) else { break };
        if check8(&head[..8]) != head[8..16] {
            // Blocks that were allocated and never written read as zeros.
            if file[at..].iter().all(|&b| b == 0) {
                break;
            }
            return Err(BadLog::Damaged(at));
        }
        let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let begin = at + RECORD_HEADER_BYTES;
        let Some(payload) = file.get(begin..begin + len) else { break };
        if check8(payload) != head[16..24] {
            if begin + len == file.len() {
                break;
            }
            return Err(BadLog::Damaged(at));
        }
        records.push(Record { kind: head[4], payload });
        at = begin + len;
    }
    Ok((records, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Vec<u8> {
        let mut f = file_header().to_vec();
        append(&mut f, 1, b"first");
        append(&mut f, 200, b"");
        append(&mut f, 2, b"third");
        f
    }

    #[test]
    fn every_torn_tail_is_cut_at_a_record() {
        let f = log();
        let (all, len) = read(&f).expect("whole");
        assert_eq!(len, f.len());
        assert_eq!(
            all.iter().map(|r| (r.kind, r.payload)).collect::<Vec<_>>(),
            [(1, &b"first"[..]), (200, b""), (2, b"third")]
        );
        for cut in 0..f.len() {
            let (some, len) = read(&f[..cut]).expect("a torn tail is no damage");
            assert!(len <= cut && some.len() <= 3 && some[..] == all[..some.len()]);
        }
    }

    #[test]
    fn damage_in_the_middle_is_an_error_not_a_short_log() {
        let f = log();
        let last = f.len() - RECORD_HEADER_BYTES - 5;
        for at in 0..last {
            for bit in 0..8 {
                let mut g = f.clone();
                g[at] ^= 1 << bit;
                // The minor version may differ; everything else before the last record is noticed.
                match read(&g) {
                    Err(_) => assert!(!(12..16).contains(&at)),
                    Ok(_) => assert!((12..16).contains(&at), "flip at {at} went unnoticed"),
                }
            }
        }
        let mut newer = f.clone();
        newer[8] = 2;
        assert_eq!(read(&newer), Err(BadLog::Major(2)));
    }
}
