//! Integers and lists of integers as bytes, for the ledger and the trace log (`docs/FORMATS-epochs.md`).
//!
//! An integer is LEB128: seven bits a byte, lowest first, in the fewest bytes. A list of entries is its
//! length, then the zigzag-coded difference of each value from the one before it.

/// The longest list that [`get_list`] reads.
pub(crate) const LIST_MAX: usize = 65_536;

/// Appends an integer.
pub(crate) fn put(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x.to_le_bytes()[0] | 0x80);
        x >>= 7;
    }
    out.push(x.to_le_bytes()[0]);
}

/// Reads an integer; `None` when the bytes end early, overflow 64 bits or are not the shortest form.
pub(crate) fn get(at: &mut &[u8]) -> Option<u64> {
    let mut x = 0u64;
    for shift in (0..64).step_by(7) {
        let (&b, rest) = at.split_first()?;
        *at = rest;
        let bits = u64::from(b & 0x7f);
        // The last byte of a 64-bit number has one bit, and no number has a needless last byte.
        if (shift == 63 && bits > 1) || (shift > 0 && b == 0) {
            return None;
        }
        x |= bits << shift;
        if b & 0x80 == 0 {
            return Some(x);
        }
    }
    None
}

/// Reads an integer that fits 32 bits.
pub(crate) fn get32(at: &mut &[u8]) -> Option<u32> {
    u32::try_from(get(at)?).ok()
}

/// Appends a list of integers.
pub(crate) fn put_list(out: &mut Vec<u8>, list: &[u32]) {
    put(out, list.len() as u64);
    let mut last = 0i64;
    for &x in list {
        let d = i64::from(x) - last;
        put(out, ((d << 1) ^ (d >> 63)).cast_unsigned());
        last = i64::from(x);
    }
}

/// Reads a list of at most [`LIST_MAX`] integers.
pub(crate) fn get_list(at: &mut &[u8]) -> Option<Vec<u32>> {
    let n = usize::try_from(get(at)?).ok().filter(|&n| n <= LIST_MAX)?;
    let mut last = 0i64;
    (0..n)
        .map(|_| {
            let z = get(at)?;
            last = last.checked_add((z >> 1).cast_signed() ^ -(z & 1).cast_signed())?;
            u32::try_from(last).ok()
        })
        .collect()
}

/// Takes the next `n` bytes; `None` when fewer are left.
pub(crate) fn take<'a>(at: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (taken, rest) = at.split_at_checked(n)?;
    *at = rest;
    Some(taken)
}
