//! Repairs the checksums of an input, by the description of the format in `docs/FORMATS*.md`.
//!
//! Nothing here is shared with the product: the contexts and offsets are written a second time.

use std::ops::Range;

/// The first 8 bytes of BLAKE3 in key-derivation mode.
fn check8(context: &str, bytes: &[u8]) -> [u8; 8] {
    let mut out = [0; 8];
    out.copy_from_slice(&blake3::derive_key(context, bytes)[..8]);
    out
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Writes `value` at `at`, if the bytes reach so far.
fn put(out: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = out.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// The header of a log, and of each record in it.
const LOG_HEADER: usize = 16;
const RECORD_HEADER: usize = 24;
const RECORD: &str = "fletch 2026 record 1";

/// Returns a log with a sound header and sound records. The last record takes all bytes that are left.
#[must_use]
pub fn log(input: &[u8]) -> Vec<u8> {
    let mut out = input.to_vec();
    out.resize(out.len().max(LOG_HEADER), 0);
    put(&mut out, 0, b"FLETCHLG\x01\0\0\0");
    let mut at = LOG_HEADER;
    while at + RECORD_HEADER <= out.len() {
        let rest = out.len() - at - RECORD_HEADER;
        let len = u32_at(&out, at).map_or(rest, |n| (n as usize).min(rest));
        put(&mut out, at, &(len as u32).to_le_bytes());
        let head = check8(RECORD, &out[at..at + 8]);
        let begin = at + RECORD_HEADER;
        let payload = check8(RECORD, &out[begin..begin + len]);
        put(&mut out, at + 8, &head);
        put(&mut out, at + 16, &payload);
        at = begin + len;
    }
    out
}

/// The offsets of a slab (`docs/FORMATS-slab.md`).
const BLOCK: usize = 512;
const LINE: usize = 64;
const SLAB_RECORD: usize = 256;
const SLAB_CHECKED: usize = 192;
const FOOTER_CHECKED: usize = 80;

/// Returns a slab whose header, record headers, payload hashes, table and footer are sound.
#[must_use]
pub fn slab(input: &[u8]) -> Vec<u8> {
    let mut out = input.to_vec();
    let header = check8("fletch 2026 slab 1", &out[..out.len().min(24)]);
    put(&mut out, 24, &header);
    let mut at = BLOCK;
    while at + SLAB_RECORD <= out.len() {
        if out[at..].starts_with(b"FLRC") {
            let begin = at + SLAB_RECORD;
            let len = u32_at(&out, at + 24).unwrap_or(0) as usize;
            if let Some(payload) = out.get(begin..begin.saturating_add(len)) {
                let hash = *blake3::hash(payload).as_bytes();
                put(&mut out, at + 32, &hash);
            }
            let check = check8("fletch 2026 slab record 1", &out[at..at + SLAB_CHECKED]);
            put(&mut out, at + SLAB_CHECKED, &check);
        }
        at += LINE;
    }
    if let Some(footer) = out.len().checked_sub(BLOCK) {
        let at = |out: &[u8], i: usize| {
            let bytes = out.get(footer + i..footer + i + 8)?.try_into().ok()?;
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        let table: Option<Range<usize>> =
            at(&out, 24).zip(at(&out, 32)).and_then(|(from, len)| Some(from..from.checked_add(len)?));
        if let Some(table) = table.and_then(|t| out.get(t)) {
            let hash = blake3::derive_key("fletch 2026 slab table 1", table);
            put(&mut out, footer + 40, &hash);
        }
        let check = check8("fletch 2026 slab table 1", &out[footer..footer + FOOTER_CHECKED]);
        put(&mut out, footer + FOOTER_CHECKED, &check);
    }
    out
}

/// Returns an archive in which each block that looks like a header has the right sum (POSIX ustar).
#[must_use]
pub fn tar(input: &[u8]) -> Vec<u8> {
    const SUM: Range<usize> = 148..156;
    let mut out = input.to_vec();
    for block in out.chunks_exact_mut(512).filter(|b| b[257..].starts_with(b"ustar")) {
        block[SUM].fill(b' ');
        let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
        block[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    out
}
