//! The manners of stores: what differs among stores that all claim to speak one API.
//!
//! Each choice stands alone, so a test combines those that it needs. The default is S3 as AWS has it.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How the emulator speaks. The default is S3 as AWS has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manners {
    /// The API. It decides about headers of conditions, and the scheme of [`super::OriginEmulator::uri`].
    pub api: Api,
    /// How a listing goes on after a page.
    pub paging: Paging,
    /// The most keys of a page; `None` for 1000, as at AWS.
    pub page_keys: Option<usize>,
    /// The order of keys in a listing.
    pub order: KeyOrder,
    /// Whether keys in a listing are percent-encoded.
    pub encoding: KeyEncoding,
    /// How the XML of a listing is written.
    pub xml: XmlForm,
    /// What the store does with the delimiter of a listing.
    pub delimiters: Delimiters,
    /// Whether a key that ends in `/` is listed as a common prefix, though no delimiter was asked for.
    ///
    /// Stores with a hierarchical namespace do that: directory buckets of S3, gateways over a file system.
    pub folders_as_prefixes: bool,
    /// How a listing describes objects.
    pub listed: Described,
    /// How answers to `GET` and `HEAD` describe objects. `If-Match` must have the same form as the tag here.
    pub answered: Described,
    /// Where a request names the bucket.
    pub host: HostStyle,
}

/// The form of an object's tag and time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Described {
    /// The entity tag.
    pub tag: TagForm,
    /// The time of the last change.
    pub time: TimeForm,
}

/// The API of the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Api {
    /// Amazon S3.
    #[default]
    S3,
    /// The XML API of Google Cloud Storage: generations, and objects that it decompresses.
    Gcs,
}

/// How a listing goes on after a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Paging {
    /// AWS: a continuation token while the listing is truncated; markers for a client of version 1.
    #[default]
    Tokens,
    /// Old gateways: truncated, without a token. `start-after` and `marker` go on.
    NoToken,
    /// Stores that know version 1 only, and ignore `list-type`, `start-after` and `continuation-token`.
    Markers {
        /// Whether a truncated page has `NextMarker`. AWS has it only with a delimiter.
        next_marker: bool,
    },
    /// A token on every page, also where `IsTruncated` is false; the pages after the last have no keys.
    TokenAtEnd,
    /// Stores that filter a page after they cut it: this many pages without keys before each further page.
    EmptyPages(u32),
    /// After the first page, only pages without keys, each with a new token: a scan that never ends.
    EndlessEmptyPages,
    /// A token element without text on the last page.
    EmptyTokenElement,
    /// Each further page begins with the last key of the page before.
    RepeatLastKey,
    /// A proxy that drops the token: each page is the first one, with a token.
    SamePage,
}

/// What a store does with the delimiter of a listing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Delimiters {
    /// It returns the common prefixes of keys: AWS.
    #[default]
    Known,
    /// It returns all keys.
    Ignored,
    /// It refuses the request, as a policy with a condition on `s3:delimiter` does.
    Refused,
    /// It returns the common prefixes and refuses to list any of them, as a policy for one prefix does.
    PrefixesRefused,
}

/// The order of keys in a listing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeyOrder {
    /// The order of UTF-8 bytes: AWS, GCS, Azure.
    #[default]
    Bytes,
    /// No order: directory buckets of S3.
    Shuffled,
    /// `/` before every other character: hierarchical namespaces, which list a directory at its name.
    SlashFirst,
    /// `/` after every other character: gateways that list files before directories.
    SlashLast,
    /// The order of UTF-16 code units: stores in Java or .NET.
    Utf16,
}

impl KeyOrder {
    /// Returns bytes that sort as this order sorts the keys.
    pub(super) fn rank(self, key: &str) -> Vec<u8> {
        let slash = |rank: u8| key.bytes().map(|b| if b == b'/' { rank } else { b }).collect();
        match self {
            KeyOrder::Bytes => key.as_bytes().to_vec(),
            KeyOrder::Shuffled => blake3::hash(key.as_bytes()).as_bytes().to_vec(),
            KeyOrder::SlashFirst => slash(0),
            KeyOrder::SlashLast => slash(u8::MAX),
            KeyOrder::Utf16 => key.encode_utf16().flat_map(u16::to_be_bytes).collect(),
        }
    }
}

/// Whether keys in a listing are percent-encoded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeyEncoding {
    /// With `encoding-type=url`: AWS.
    #[default]
    WhenAsked,
    /// Always, with `<EncodingType>url</EncodingType>`: some gateways.
    Always,
    /// Never, also where a client asks for it: stores that do not know the parameter.
    Never,
}

impl KeyEncoding {
    /// Returns whether a listing is encoded for a client that asks for it or does not.
    pub(super) fn applies(self, asked: bool) -> bool {
        match self {
            KeyEncoding::WhenAsked => asked,
            KeyEncoding::Always => true,
            KeyEncoding::Never => false,
        }
    }
}

/// Returns a key as a listing with `<EncodingType>url</EncodingType>` has it.
pub(super) fn encoded(key: &str) -> String {
    utf8_percent_encode(key, NON_ALPHANUMERIC).to_string()
}

/// How the XML of a listing is written. All forms say the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum XmlForm {
    /// Without white space: AWS.
    #[default]
    Plain,
    /// With line breaks and indentation between elements.
    Pretty,
    /// With a namespace prefix at every element.
    Prefixed,
    /// With attributes at elements.
    Attributes,
    /// With CDATA sections as the text of elements.
    Cdata,
    /// With a character reference for every character of a key that is no letter and no digit.
    References,
    /// With comments and with elements that S3 does not have, one of which holds a `Key`.
    UnknownElements,
}

/// The form of an entity tag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TagForm {
    /// `"0a1b"`: AWS.
    #[default]
    Quoted,
    /// `0a1b`: listings of GCS's older XML API and of several gateways.
    Unquoted,
    /// `W/"0a1b"`: nginx and CDNs in front of a store, after a change of coding.
    Weak,
    /// `"0A1B"`: stores on .NET.
    UpperCase,
    /// `"0a1b-2"`: an object that was uploaded in parts.
    Multipart,
    /// None: WebDAV gateways.
    Absent,
    /// An empty text.
    Empty,
}

impl TagForm {
    /// Returns a quoted tag in this form.
    pub(super) fn of(self, quoted: &str) -> Option<String> {
        let bare = quoted.trim_matches('"');
        match self {
            TagForm::Quoted => Some(quoted.to_owned()),
            TagForm::Unquoted => Some(bare.to_owned()),
            TagForm::Weak => Some(format!("W/{quoted}")),
            TagForm::UpperCase => Some(quoted.to_ascii_uppercase()),
            TagForm::Multipart => Some(format!("\"{bare}-2\"")),
            TagForm::Absent => None,
            TagForm::Empty => Some(String::new()),
        }
    }
}

/// The form of the time of the last change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TimeForm {
    /// AWS: [`TimeForm::Millis`] in a listing, [`TimeForm::Rfc1123`] in an answer.
    #[default]
    Usual,
    /// `2024-11-05T10:00:00.000Z`: AWS.
    Millis,
    /// `2024-11-05T10:00:00Z`.
    Seconds,
    /// `2024-11-05T12:00:00+02:00`.
    Offset,
    /// `2024-11-05 10:00:00`.
    Space,
    /// `Tue, 05 Nov 2024 10:00:00 GMT`: Azure's listings, and every HTTP header.
    Rfc1123,
    /// `1730800800`.
    Epoch,
    /// None.
    Absent,
}

impl TimeForm {
    /// Returns a time as a listing has it.
    pub(super) fn in_listing(self, time: SystemTime) -> Option<String> {
        if self == TimeForm::Usual { TimeForm::Millis.of(time) } else { self.of(time) }
    }

    /// Returns a time as a header has it.
    pub(super) fn in_answer(self, time: SystemTime) -> Option<String> {
        if self == TimeForm::Usual { TimeForm::Rfc1123.of(time) } else { self.of(time) }
    }

    fn of(self, time: SystemTime) -> Option<String> {
        const AHEAD: Duration = Duration::from_secs(2 * 3600);
        let seconds = |time| humantime::format_rfc3339_seconds(time).to_string();
        match self {
            TimeForm::Usual | TimeForm::Millis => Some(humantime::format_rfc3339_millis(time).to_string()),
            TimeForm::Seconds => Some(seconds(time)),
            TimeForm::Offset => Some(seconds(time + AHEAD).replace('Z', "+02:00")),
            TimeForm::Space => Some(seconds(time).replace('T', " ").replace('Z', "")),
            TimeForm::Rfc1123 => Some(httpdate::fmt_http_date(time)),
            TimeForm::Epoch => {
                Some(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().to_string())
            }
            TimeForm::Absent => None,
        }
    }
}

/// Where a request names the bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HostStyle {
    /// In the path or in the host: AWS.
    #[default]
    Either,
    /// In the host only, as `bucket.host`: AWS for new buckets, Alibaba Cloud OSS.
    VirtualOnly,
    /// In the path only: MinIO without a domain.
    PathOnly,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_tags_have_their_forms() {
        let time = UNIX_EPOCH + Duration::from_millis(1_730_800_800_123);
        let forms = [
            (TimeForm::Millis, "2024-11-05T10:00:00.123Z"),
            (TimeForm::Seconds, "2024-11-05T10:00:00Z"),
            (TimeForm::Offset, "2024-11-05T12:00:00+02:00"),
            (TimeForm::Space, "2024-11-05 10:00:00"),
            (TimeForm::Rfc1123, "Tue, 05 Nov 2024 10:00:00 GMT"),
            (TimeForm::Epoch, "1730800800"),
        ];
        for (form, text) in forms {
            assert_eq!(form.in_listing(time).as_deref(), Some(text), "{form:?}");
            assert_eq!(form.in_answer(time).as_deref(), Some(text), "{form:?}");
        }
        assert_eq!(TimeForm::Absent.in_listing(time), None);
        assert_eq!(TimeForm::Usual.in_listing(time).as_deref(), Some("2024-11-05T10:00:00.123Z"));
        assert_eq!(TimeForm::Usual.in_answer(time).as_deref(), Some("Tue, 05 Nov 2024 10:00:00 GMT"));
        let tags = [
            (TagForm::Quoted, Some("\"0a1b\"")),
            (TagForm::Unquoted, Some("0a1b")),
            (TagForm::Weak, Some("W/\"0a1b\"")),
            (TagForm::UpperCase, Some("\"0A1B\"")),
            (TagForm::Multipart, Some("\"0a1b-2\"")),
            (TagForm::Absent, None),
            (TagForm::Empty, Some("")),
        ];
        for (form, text) in tags {
            assert_eq!(form.of("\"0a1b\"").as_deref(), text, "{form:?}");
        }
    }

    #[test]
    fn orders_differ_where_stores_do() {
        let sorted = |order: KeyOrder, keys: [&'static str; 3]| {
            let mut keys = keys;
            keys.sort_by_key(|key| order.rank(key));
            keys
        };
        let folder = ["train.csv", "train/1", "train/2"];
        assert_eq!(sorted(KeyOrder::Bytes, folder), folder);
        assert_eq!(sorted(KeyOrder::SlashFirst, folder), ["train/1", "train/2", "train.csv"]);
        assert_eq!(sorted(KeyOrder::SlashLast, ["a/1", "ab", "a0"]), ["a0", "ab", "a/1"]);
        // U+1F600 is two surrogates, which are less than U+FF01 as code units and greater as bytes.
        let plane = ["\u{1f600}", "\u{ff01}", "a"];
        assert_eq!(sorted(KeyOrder::Bytes, plane), ["a", "\u{ff01}", "\u{1f600}"]);
        assert_eq!(sorted(KeyOrder::Utf16, plane), ["a", "\u{1f600}", "\u{ff01}"]);
    }
}
