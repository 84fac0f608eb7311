//! One header block, pax records, and the first bytes of compressed files.

use super::BLOCK_BYTES;

/// The fields of a header, before extended headers change them.
pub(super) struct Header {
    pub kind: u8,
    pub name: Vec<u8>,
    pub size: u64,
}

impl Header {
    /// Reads a block of [`BLOCK_BYTES`] bytes.
    pub fn parse(block: &[u8]) -> Result<Self, &'static str> {
        let sum = octal(&block[148..156]).ok_or("its checksum is no number")?;
        let bytes = || block.iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { b' ' } else { *b });
        let unsigned: u64 = bytes().map(u64::from).sum();
        // Old programs added up signed characters.
        let signed: i64 = bytes().map(|b| i64::from(b.cast_signed())).sum();
        if sum != unsigned && i64::try_from(sum) != Ok(signed) {
            return Err("its checksum differs");
        }
        debug_assert_eq!(block.len(), BLOCK_BYTES);
        let mut name = until_nul(&block[..100]).to_vec();
        let prefix = until_nul(&block[345..500]);
        // POSIX ustar only: GNU keeps times where the prefix is.
        if &block[257..263] == b"ustar\0" && !prefix.is_empty() {
            name = [prefix, b"/", &name].concat();
        }
        Ok(Header { kind: block[156], name, size: number(&block[124..136]).ok_or("its size is no number")? })
    }
}

pub(super) fn until_nul(b: &[u8]) -> &[u8] {
    b.split(|x| *x == 0).next().unwrap_or(b)
}

/// Reads a number below 2⁶³, in octal digits, or in binary when the first bit is set (GNU).
fn number(field: &[u8]) -> Option<u64> {
    match field.split_first() {
        Some((first, rest)) if first & 0x80 != 0 => {
            // 0xff begins a negative number.
            let start = u64::from(first & 0x7f);
            let value = rest
                .iter()
                .try_fold(start, |n, b| n.checked_mul(256).and_then(|n| n.checked_add(u64::from(*b))))?;
            i64::try_from(value).is_ok().then_some(value)
        }
        _ => octal(field),
    }
}

/// Reads octal digits between spaces or NULs; an empty field is 0.
fn octal(field: &[u8]) -> Option<u64> {
    let text = until_nul(field.trim_ascii_start()).trim_ascii_end();
    let digits = text.iter().all(|b| (b'0'..=b'7').contains(b));
    digits.then(|| text.iter().fold(0, |n, b| n * 8 + u64::from(b - b'0')))
}

type Record<'a> = Result<(&'a [u8], &'a [u8]), &'static str>;

/// Returns the records `length key=value\n` of a pax header, up to the first that cannot be read.
pub(super) fn pax(mut text: &[u8]) -> impl Iterator<Item = Record<'_>> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let record = pax_record(text);
        text = record.map_or(&[], |(_, rest)| rest);
        Some(record.map(|(kv, _)| kv).ok_or("a pax record that cannot be read"))
    })
}

type KeyValue<'a> = (&'a [u8], &'a [u8]);

/// Reads the first record; returns it and the rest.
fn pax_record(text: &[u8]) -> Option<(KeyValue<'_>, &[u8])> {
    let space = text.iter().position(|b| *b == b' ')?;
    let len: usize = std::str::from_utf8(&text[..space]).ok()?.parse().ok()?;
    let (record, rest) = text.split_at_checked(len)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|b| *b == b'=')?;
    Some(((&record[..equals], &record[equals + 1..]), rest))
}

/// Returns the program that compressed a file with this beginning.
pub(super) fn compression(start: &[u8]) -> Option<&'static str> {
    const MAGIC: [(&[u8], &str); 6] = [
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh", "bzip2"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"PK\x03\x04", "zip"),
    ];
    MAGIC.iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, name)| *name)
}
