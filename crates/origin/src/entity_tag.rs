//! Entity tags, compared by what they mean: stores write one tag in several forms.
//!
//! A listing and an answer may differ in quotes, in `W/`, in blanks and in the case of hex digits. The tag of
//! an object that was written in parts (`MD5-N`) says nothing about the tag of the same bytes that were
//! written at once, and a missing tag says nothing at all. Other texts, such as one with the suffix `-gzip`,
//! are other tags.

/// An entity tag of a listing, an answer or a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntityTag<'a> {
    /// The text between the quotes, as it was sent.
    opaque: &'a str,
    is_weak: bool,
}

/// What two entity tags say about the bytes of two objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagMatch {
    /// The tags are the same.
    Same,
    /// The tags differ.
    Different,
    /// The tags cannot be compared: one is missing, or only one is that of an object written in parts.
    Undecided,
}

/// The digits of an MD5 sum.
const MD5_DIGITS: usize = 32;

impl<'a> EntityTag<'a> {
    /// Reads a tag in any form. Returns `None` for a text without a tag, such as `""`.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let text = text.trim();
        let weak = text.strip_prefix("W/").or_else(|| text.strip_prefix("w/"));
        let opaque = weak.unwrap_or(text).trim();
        let quoted = opaque.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        let opaque = quoted.unwrap_or(opaque).trim();
        (!opaque.is_empty() && opaque != "\"").then_some(EntityTag { opaque, is_weak: weak.is_some() })
    }

    /// Compares two tags, each possibly missing. A weak tag is the same as the strong one of its text.
    #[must_use]
    pub fn compare(one: Option<&str>, other: Option<&str>) -> TagMatch {
        let (one, other) = (one.and_then(EntityTag::parse), other.and_then(EntityTag::parse));
        let (Some(one), Some(other)) = (one, other) else { return TagMatch::Undecided };
        let is_same = match one.is_hex() && other.is_hex() {
            true => one.opaque.eq_ignore_ascii_case(other.opaque),
            false => one.opaque == other.opaque,
        };
        match is_same {
            true => TagMatch::Same,
            false if one.is_multipart() && other.is_md5() => TagMatch::Undecided,
            false if one.is_md5() && other.is_multipart() => TagMatch::Undecided,
            false => TagMatch::Different,
        }
    }

    /// Returns the value of `If-Match` for this tag. `None` if no answer could match: a weak tag never does
    /// (RFC 9110, 13.1.1), and some texts cannot be in the header.
    #[must_use]
    pub fn condition(&self) -> Option<String> {
        let can_be_sent = self.opaque.bytes().all(|b| matches!(b, b'!' | b'#'..=b'~'));
        (can_be_sent && !self.is_weak).then(|| format!("\"{}\"", self.opaque))
    }

    /// Whether the tag consists of hex digits, with or without the number of parts.
    fn is_hex(&self) -> bool {
        let digits = self.opaque.strip_prefix("0x").or_else(|| self.opaque.strip_prefix("0X"));
        let digits = digits.unwrap_or(self.opaque);
        digits.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
    }

    fn is_md5(&self) -> bool {
        self.opaque.len() == MD5_DIGITS && self.opaque.bytes().all(|b| b.is_ascii_hexdigit())
    }

    /// Whether the tag is that of an object that was written in parts: `MD5-N`.
    fn is_multipart(&self) -> bool {
        let Some((sum, parts)) = self.opaque.split_once('-') else { return false };
        let is_number = (1..=5).contains(&parts.len()) && parts.bytes().all(|b| b.is_ascii_digit());
        is_number && sum.len() == MD5_DIGITS && sum.bytes().all(|b| b.is_ascii_hexdigit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MD5: &str = "9e107d9d372bb6826bd81d3542a419d6";

    #[test]
    fn tags_are_compared_by_meaning_in_every_form() {
        let (quoted, upper) = (format!("\"{MD5}\""), MD5.to_uppercase());
        let (weak, blanks) = (format!("W/\"{MD5}\""), format!("  \"{MD5}\" "));
        let (parts, gzip) = (format!("\"{MD5}-7\""), format!("\"{MD5}-gzip\""));
        let other = format!("\"{}\"", MD5.replace('9', "8"));
        let (parts_upper, more_parts) = (format!("{upper}-7"), format!("\"{MD5}-8\""));
        use TagMatch::{Different, Same, Undecided};
        let cases: Vec<(Option<&str>, Option<&str>, TagMatch)> = vec![
            (Some(&quoted), Some(MD5), Same),
            (Some(&quoted), Some(&weak), Same),
            (Some(&weak), Some(&weak), Same),
            (Some(&weak), Some("w/9e107d9d372bb6826bd81d3542a419d6"), Same),
            (Some(&quoted), Some(&upper), Same),
            (Some("\"0x8DA1B2\""), Some("0X8da1b2"), Same),
            (Some(&blanks), Some(&quoted), Same),
            (Some(&parts), Some(&parts_upper), Same),
            (Some(&quoted), Some(&parts), Undecided),
            (Some(&parts), Some(&upper), Undecided),
            (None, Some(&quoted), Undecided),
            (Some(&quoted), None, Undecided),
            (None, None, Undecided),
            (Some(""), Some(&quoted), Undecided),
            (Some(&quoted), Some("\"\""), Undecided),
            (Some("W/\"\""), Some(&quoted), Undecided),
            (Some(" \" "), Some(&quoted), Undecided),
            (Some(&quoted), Some(&other), Different),
            (Some(&weak), Some(&other), Different),
            (Some(&quoted), Some(&gzip), Different),
            (Some(&parts), Some(&more_parts), Different),
            // Only hex digits have no case.
            (Some("\"version-x\""), Some("\"Version-X\""), Different),
        ];
        for (one, other, expected) in cases {
            assert_eq!(EntityTag::compare(one, other), expected, "{one:?} {other:?}");
            assert_eq!(EntityTag::compare(other, one), expected, "{other:?} {one:?}");
        }
    }

    #[test]
    fn a_condition_is_sent_only_where_it_can_match() {
        let condition = |text| EntityTag::parse(text).and_then(|tag| tag.condition());
        assert_eq!(condition("abc").as_deref(), Some("\"abc\""));
        assert_eq!(condition("\"aBc\"").as_deref(), Some("\"aBc\""), "in the store's own case");
        for text in ["W/\"abc\"", "", "\"\"", "  ", "\"a\"b\"", "\"a b\"", "\"a\u{1}\"", "\"\u{e9}\""] {
            assert_eq!(condition(text), None, "{text:?}");
        }
    }
}
