//! The id of a request, by which the log lines of several programs are joined.

use std::{fmt, sync::Arc};

/// The longest id, in bytes.
const BYTES_MAX: usize = 64;

/// The id of a request: 1 to 64 ASCII letters, digits, `-`, `_`, `.` and `:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestId(Form);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    Given(Arc<str>),
    /// 16 hexadecimal digits.
    Drawn(u64),
}

impl RequestId {
    /// Returns an id that a client gave, or `None` if it is not valid.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
        let is_valid = (1..=BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed);
        is_valid.then(|| RequestId(Form::Given(text.into())))
    }

    /// Returns a new id: 16 hexadecimal digits of a random number.
    #[must_use]
    pub fn of_number(random: u64) -> Self {
        RequestId(Form::Drawn(random))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Form::Given(text) => f.write_str(text),
            Form::Drawn(number) => write!(f, "{number:016x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_short_and_plain() {
        assert_eq!(RequestId::of_number(255).to_string(), "00000000000000ff");
        for id in ["a", "7b1c-4.x:9_", &"f".repeat(64)] {
            assert_eq!(RequestId::new(id).expect("valid").to_string(), id);
        }
        for id in ["", "a b", "a\nb", "\u{e9}", &"f".repeat(65)] {
            assert_eq!(RequestId::new(id), None, "{id}");
        }
    }
}
