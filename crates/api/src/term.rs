//! The header [`crate::headers::TERM`]: by which right a server of a cluster answers for a job.

use std::{fmt, time::Duration};

/// The term of a job's group, and for how long the server that answers stays its primary at least.
///
/// A client that gets the answer later than `valid` after it sent the request cannot rely on it: another
/// server may be the primary by then. It asks again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TermStamp {
    /// The group of the job. Terms of different groups cannot be compared.
    pub group: String,
    /// Counts the servers that have had the group, from 1.
    pub term: u64,
    /// For how long the server is the primary of the group at least, from its answer on.
    pub valid: Duration,
}

impl fmt::Display for TermStamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.group, self.term, self.valid.as_millis())
    }
}

impl TermStamp {
    /// Reads the value of the header. Returns `None` for one that this build does not understand.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (group, term, valid) = (words.next()?, words.next()?, words.next()?);
        if group.is_empty() {
            return None;
        }
        let (term, valid) = (term.parse().ok()?, Duration::from_millis(valid.parse().ok()?));
        Some(TermStamp { group: group.to_owned(), term, valid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_has_a_fixed_text() {
        let stamp = TermStamp { group: "sweep-1.0".into(), term: 3, valid: Duration::from_millis(6_670) };
        assert_eq!(stamp.to_string(), "sweep-1.0 3 6670");
        assert_eq!(TermStamp::parse("sweep-1.0 3 6670"), Some(stamp.clone()));
        assert_eq!(TermStamp::parse("sweep-1.0 3 6670 a newer word"), Some(stamp));
        for bad in ["", "g", "g 3", "g x 1", "g 3 x", " 3 1", "g -3 1"] {
            assert_eq!(TermStamp::parse(bad), None, "{bad:?}");
        }
    }
}
