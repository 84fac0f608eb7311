//! Thrift's compact protocol, read so that no input costs more than its bytes.
//!
//! Parquet describes its footers and its page headers in this protocol. The parquet crate reads a field that
//! it knows without a look at the field's type, and skips a list of booleans without a byte of input. So a
//! list that claims 2^31 elements within other such lists keeps it busy for ever. [`Reader::copy`] passes on
//! only fields of a description, of the types that the description gives.
//!
//! The protocol: <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>.

use crate::untrusted::bad;
use parquet::errors::Result;

/// The deepest nesting.
const DEPTH_MAX: u8 = 16;
/// The most bytes of a variable-length integer.
const VARINT_BYTES_MAX: usize = 10;

/// A type of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Bool,
    I16,
    I32,
    I64,
    Binary,
    List(&'static Kind),
    Struct(Fields),
}

/// The fields of a struct that are passed on: their ids and types.
pub(crate) type Fields = &'static [(i16, Kind)];

/// The codes of types on the wire.
mod code {
    pub const STOP: u8 = 0;
    pub const TRUE: u8 = 1;
    pub const FALSE: u8 = 2;
    pub const BYTE: u8 = 3;
    pub const I16: u8 = 4;
    pub const I32: u8 = 5;
    pub const I64: u8 = 6;
    pub const DOUBLE: u8 = 7;
    pub const BINARY: u8 = 8;
    pub const LIST: u8 = 9;
    pub const SET: u8 = 10;
    pub const MAP: u8 = 11;
    pub const STRUCT: u8 = 12;
    pub const UUID: u8 = 13;
}

impl Kind {
    fn has_code(self, wire: u8) -> bool {
        match self {
            Kind::Bool => matches!(wire, code::TRUE | code::FALSE),
            Kind::I16 => wire == code::I16,
            Kind::I32 => wire == code::I32,
            Kind::I64 => wire == code::I64,
            Kind::Binary => wire == code::BINARY,
            Kind::List(_) => wire == code::LIST,
            Kind::Struct(_) => wire == code::STRUCT,
        }
    }
}

/// Reads values from the front of some bytes.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    /// Returns the bytes that were not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn take(&mut self, n: u64) -> Result<&'a [u8]> {
        let n = usize::try_from(n).ok().filter(|&n| n <= self.rest.len());
        let (taken, rest) = self.rest.split_at(n.ok_or_else(|| bad("its description is cut off"))?);
        self.rest = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    /// Reads a variable-length integer: its bytes and its value.
    fn varint(&mut self) -> Result<(&'a [u8], u64)> {
        let len = self.rest.iter().take(VARINT_BYTES_MAX).position(|b| b & 0x80 == 0);
        let bytes = self.take(len.map_or(u64::MAX, |len| len as u64 + 1))?;
        let value = bytes.iter().rev().fold(0, |value, b| value << 7 | u64::from(b & 0x7f));
        Ok((bytes, value))
    }

    /// Reads the head of a field: its type and its id, or `None` at the end of the struct.
    fn field(&mut self, last: i16) -> Result<Option<(u8, i16)>> {
        let head = self.byte()?;
        let (delta, wire) = (i16::from(head >> 4), head & 0xf);
        if wire == code::STOP {
            return Ok(None);
        }
        let id = match delta {
            0 => i16::try_from(unzigzag(self.varint()?.1)).ok(),
            _ => last.checked_add(delta),
        };
        Ok(Some((wire, id.ok_or_else(|| bad("its description has a field without a valid id"))?)))
    }

    /// Reads the head of a list: the type and the number of its elements.
    fn list(&mut self) -> Result<(u8, u64)> {
        let head = self.byte()?;
        let size = if head >> 4 == 15 { self.varint()?.1 } else { u64::from(head >> 4) };
        if size > self.rest.len() as u64 {
            return Err(bad(format!("its description claims a list of {size} elements")));
        }
        Ok((head & 0xf, size))
    }

    /// Reads past a value. Each element of a list takes a byte at least.
    fn skip(&mut self, wire: u8, in_list: bool, depth: u8) -> Result<()> {
        let deeper = deeper(depth)?;
        match wire {
            code::TRUE | code::FALSE => drop(self.take(in_list.into())?),
            code::BYTE => drop(self.byte()?),
            code::I16 | code::I32 | code::I64 => drop(self.varint()?),
            code::DOUBLE => drop(self.take(8)?),
            code::UUID => drop(self.take(16)?),
            code::BINARY => {
                let (_, len) = self.varint()?;
                self.take(len)?;
            }
            code::LIST | code::SET => {
                let (element, size) = self.list()?;
                for _ in 0..size {
                    self.skip(element, true, deeper)?;
                }
            }
            code::MAP => {
                let (_, size) = self.varint()?;
                let types = if size > 0 { self.byte()? } else { 0 };
                for _ in 0..size {
                    self.skip(types >> 4, true, deeper)?;
                    self.skip(types & 0xf, true, deeper)?;
                }
            }
            code::STRUCT => self.skip_fields(0, deeper)?,
            _ => return Err(bad(format!("its description has a value of the unknown type {wire}"))),
        }
        Ok(())
    }

    /// Reads a struct, and appends to `out` the same struct with these fields only.
    ///
    /// # Errors
    /// When the bytes are no struct, or when one of the fields has another type.
    pub fn copy(&mut self, fields: Fields, out: &mut Vec<u8>) -> Result<()> {
        self.copy_struct(fields, out, DEPTH_MAX)
    }

    /// Reads a whole struct. Returns its field of this id, a number of 32 bits; `None` if it has none.
    ///
    /// # Errors
    /// When the bytes are no struct.
    pub fn i32_field(&mut self, wanted: i16) -> Result<Option<i64>> {
        let number = if self.find(wanted, code::I32)? { Some(unzigzag(self.varint()?.1)) } else { None };
        if number.is_some() {
            self.skip_fields(wanted, DEPTH_MAX)?;
        }
        Ok(number)
    }

    /// Reads up to the struct that is the field of this id. Returns whether there is one.
    ///
    /// # Errors
    /// When the bytes are no struct.
    pub fn enter(&mut self, wanted: i16) -> Result<bool> {
        self.find(wanted, code::STRUCT)
    }

    /// Reads up to the elements of the list that is the field of this id. Returns their number.
    ///
    /// # Errors
    /// When the bytes are no struct.
    pub fn enter_list(&mut self, wanted: i16) -> Result<u64> {
        if self.find(wanted, code::LIST)? { Ok(self.list()?.1) } else { Ok(0) }
    }

    /// Reads up to the value of the field of this id and type, or to the end of the struct.
    fn find(&mut self, wanted: i16, of_type: u8) -> Result<bool> {
        let mut last = 0;
        while let Some((wire, id)) = self.field(last)? {
            if (id, wire) == (wanted, of_type) {
                return Ok(true);
            }
            self.skip(wire, false, DEPTH_MAX)?;
            last = id;
        }
        Ok(false)
    }

    /// Reads past the fields after the one of this id.
    fn skip_fields(&mut self, mut last: i16, depth: u8) -> Result<()> {
        while let Some((wire, id)) = self.field(last)? {
            self.skip(wire, false, depth)?;
            last = id;
        }
        Ok(())
    }

    fn copy_struct(&mut self, fields: Fields, out: &mut Vec<u8>, depth: u8) -> Result<()> {
        let deeper = deeper(depth)?;
        let (mut last, mut last_out) = (0, 0);
        while let Some((wire, id)) = self.field(last)? {
            last = id;
            let Some((_, kind)) = fields.iter().find(|(known, _)| *known == id) else {
                self.skip(wire, false, deeper)?;
                continue;
            };
            if !kind.has_code(wire) {
                return Err(bad(format!("field {id} of its description has another type")));
            }
            match id.checked_sub(last_out) {
                Some(delta @ 1..=15) => out.push((delta as u8) << 4 | wire),
                _ => return Err(bad(format!("field {id} of its description is out of order"))),
            }
            last_out = id;
            self.copy_value(*kind, out, deeper)?;
        }
        out.push(code::STOP);
        Ok(())
    }

    fn copy_value(&mut self, kind: Kind, out: &mut Vec<u8>, depth: u8) -> Result<()> {
        match kind {
            Kind::Bool => {}
            Kind::I16 | Kind::I32 | Kind::I64 => {
                let (bytes, value) = self.varint()?;
                let most = match kind {
                    Kind::I16 => u16::MAX.into(),
                    Kind::I32 => u32::MAX.into(),
                    _ => u64::MAX,
                };
                if value > most {
                    return Err(bad("a number of its description does not fit its type"));
                }
                out.extend_from_slice(bytes);
            }
            Kind::Binary => {
                let (head, len) = self.varint()?;
                out.extend_from_slice(head);
                out.extend_from_slice(self.take(len)?);
            }
            Kind::Struct(fields) => self.copy_struct(fields, out, depth)?,
            Kind::List(element) => {
                let before = self.rest;
                let (wire, size) = self.list()?;
                if size > 0 && !element.has_code(wire) {
                    return Err(bad("a list of its description has elements of another type"));
                }
                out.extend_from_slice(&before[..before.len() - self.rest.len()]);
                for _ in 0..size {
                    self.copy_value(*element, out, depth)?;
                }
            }
        }
        Ok(())
    }
}

fn deeper(depth: u8) -> Result<u8> {
    depth.checked_sub(1).ok_or_else(|| bad("its description is nested too deeply"))
}

fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

#[cfg(test)]
mod tests;
