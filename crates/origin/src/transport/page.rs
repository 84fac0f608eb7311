//! Parses a page of a listing: of S3 and GCS (`ListBucketResult`), and of Azure (`EnumerationResults`).
//!
//! `object_store` cuts slashes off keys, ends the listing at the first key that is no path, and does not say
//! whether a page without a token is the last one. So [`super::CheckedService`] parses each page here, and
//! passes the result on in the extensions of an answer without keys.
//!
//! 1. A key is returned as the store has it, byte by byte.
//! 2. Only the size of a key is required. A time or an entity tag that cannot be read is `None`.
//! 3. No text of a page reaches an error.

use super::times;
use crate::object::ObjectMeta;
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::{BytesStart, Event};
use quick_xml::reader::Reader;
use std::borrow::Cow;
use std::sync::Arc;

/// One page of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Page {
    /// The objects, in the order of the store. The path of each is its whole key.
    pub objects: Vec<ObjectMeta>,
    /// The common prefixes of the other keys, where the request had a delimiter. Some stores have them here
    /// in any case, for directories.
    pub prefixes: Vec<String>,
    /// Whether an object is a directory of a hierarchical namespace.
    pub has_directories: bool,
    /// Whether more keys follow. `None` if the page does not say it, as those of Azure.
    pub is_truncated: Option<bool>,
    /// The token of the next page, if it is not empty.
    pub token: Option<String>,
    /// The greatest key or prefix that the page covers (`NextMarker` of the first version of the API).
    pub next_marker: Option<String>,
}

/// A page on its way through `object_store`.
#[derive(Debug, Clone, Default)]
pub(crate) struct CarriedPage(Arc<Mutex<Option<Page>>>);

impl CarriedPage {
    pub fn new(page: Page) -> Self {
        CarriedPage(Arc::new(Mutex::new(Some(page))))
    }

    /// Takes the page out. `None` if it was taken before.
    pub fn take(&self) -> Option<Page> {
        self.0.lock().take()
    }
}

/// A body without keys that `object_store` accepts in place of a page.
pub(crate) fn stand_in(is_azure: bool) -> &'static str {
    match is_azure {
        true => "<EnumerationResults><Blobs></Blobs></EnumerationResults>",
        false => "<ListBucketResult></ListBucketResult>",
    }
}

/// The texts of an entry, as far as they came.
#[derive(Default)]
struct Texts {
    key: Option<String>,
    /// Whether the key is percent-encoded, whatever the page says.
    is_encoded: bool,
    size: Option<String>,
    modified: Option<String>,
    etag: Option<String>,
    resource_type: Option<String>,
}

/// Parses a page. `None` if the body has another form, or an entry has no key or no size.
pub(crate) fn parse(body: &[u8]) -> Option<Page> {
    let text = std::str::from_utf8(body).ok()?;
    let mut reader = Reader::from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut page = Page::default();
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut leaf = String::new();
    let mut entry: Option<Texts> = None;
    let (mut is_azure, mut is_complete, mut is_url_encoded) = (false, false, false);
    let mut entries: Vec<Texts> = Vec::new();
    // The common prefixes, and whether each is percent-encoded, whatever the page says.
    let mut prefixes: Vec<(String, bool)> = Vec::new();
    let mut is_name_encoded = false;
    loop {
        match reader.read_event().ok()? {
            Event::Start(start) => {
                let name = start.local_name().as_ref().to_vec();
                match (names.len(), name.as_slice()) {
                    (0, b"ListBucketResult") => {}
                    (0, b"EnumerationResults") => is_azure = true,
                    (0, _) => return None,
                    (1, b"Contents") | (2, b"Blob") if is_azure == (name == b"Blob") => {
                        entry = Some(Texts::default());
                    }
                    (3, b"Name") => {
                        is_name_encoded = says_encoded(&start);
                        if let Some(entry) = &mut entry {
                            entry.is_encoded = is_name_encoded;
                        }
                    }
                    _ => {}
                }
                names.push(name);
                leaf.clear();
            }
            Event::Text(part) => leaf.push_str(&part.decode().ok()?),
            Event::CData(part) => leaf.push_str(&part.decode().ok()?),
            Event::GeneralRef(reference) => match reference.resolve_char_ref().ok()? {
                Some(char) => leaf.push(char),
                None => leaf.push_str(resolve_predefined_entity(&reference.decode().ok()?)?),
            },
            Event::End(_) => {
                let name = names.pop()?;
                let text = std::mem::take(&mut leaf);
                match (&mut entry, names.len(), name.as_slice()) {
                    (Some(_), 1, b"Contents") | (Some(_), 2, b"Blob") => entries.extend(entry.take()),
                    (Some(entry), 2 | 3, _) if is_of_entry(is_azure, names.len()) => {
                        entry.set(is_azure, &name, text);
                    }
                    (Some(entry), 4, _) if is_azure && names[3] == b"Properties" => {
                        entry.set_property(&name, text);
                    }
                    (None, 2, b"Prefix") if !is_azure && names[1] == b"CommonPrefixes" => {
                        prefixes.push((text, false));
                    }
                    (None, 3, b"Name") if is_azure && names[2] == b"BlobPrefix" => {
                        prefixes.push((text, is_name_encoded));
                    }
                    (None, 1, b"IsTruncated") => {
                        page.is_truncated = Some(text.trim().eq_ignore_ascii_case("true"));
                    }
                    (None, 1, b"EncodingType") => is_url_encoded = text.trim().eq_ignore_ascii_case("url"),
                    (None, 1, b"NextContinuationToken") => page.token = Some(text).filter(|t| !t.is_empty()),
                    (None, 1, b"NextMarker") if is_azure => page.token = Some(text).filter(|t| !t.is_empty()),
                    (None, 1, b"NextMarker") => page.next_marker = Some(text).filter(|t| !t.is_empty()),
                    (_, 0, _) => is_complete = true,
                    _ => {}
                }
            }
            Event::Empty(start) => match (names.len(), start.local_name().as_ref()) {
                (0, b"ListBucketResult" | b"EnumerationResults") => is_complete = true,
                (0, _) => return None,
                _ => {}
            },
            // An entity that a document type declares could be of any length.
            Event::DocType(_) => return None,
            Event::Eof => break,
            Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
        }
    }
    if !is_complete || !names.is_empty() {
        return None;
    }
    if is_url_encoded {
        page.next_marker = page.next_marker.and_then(|key| decoded(&key).map(Cow::into_owned));
    }
    page.has_directories = entries.iter().any(Texts::is_directory);
    page.objects = entries.into_iter().map(|texts| texts.object(is_url_encoded)).collect::<Option<_>>()?;
    let prefixes = prefixes.into_iter().map(|(text, is_encoded)| name(text, is_encoded, is_url_encoded));
    page.prefixes = prefixes.collect::<Option<_>>()?;
    Some(page)
}

/// Whether an element below `depth` others belongs to an entry: to `Contents`, or to `Blob` in `Blobs`.
fn is_of_entry(is_azure: bool, depth: usize) -> bool {
    depth == if is_azure { 3 } else { 2 }
}

/// Whether Azure percent-encoded a name that XML cannot express (`<Name Encoded="true">`).
fn says_encoded(start: &BytesStart<'_>) -> bool {
    let attribute = start.try_get_attribute("Encoded").ok().flatten();
    attribute.is_some_and(|a| a.value.eq_ignore_ascii_case(b"true"))
}

/// Returns a key or a prefix as the store has it.
fn name(text: String, is_encoded: bool, is_url_encoded: bool) -> Option<String> {
    // In the encoding of S3 a space is a plus sign.
    Some(match (is_encoded, is_url_encoded) {
        (true, _) => decoded(&text)?.into_owned(),
        (false, true) => decoded(&text.replace('+', " "))?.into_owned(),
        (false, false) => text,
    })
}

fn decoded(text: &str) -> Option<Cow<'_, str>> {
    percent_decode_str(text).decode_utf8().ok()
}

impl Texts {
    fn set(&mut self, is_azure: bool, name: &[u8], text: String) {
        let field = match (is_azure, name) {
            (false, b"Key") | (true, b"Name") => &mut self.key,
            (false, b"Size") => &mut self.size,
            (false, b"LastModified") => &mut self.modified,
            (false, b"ETag") => &mut self.etag,
            _ => return,
        };
        *field = Some(text);
    }

    fn set_property(&mut self, name: &[u8], text: String) {
        let field = match name {
            b"Content-Length" => &mut self.size,
            b"Last-Modified" => &mut self.modified,
            b"Etag" | b"ETag" => &mut self.etag,
            b"ResourceType" => &mut self.resource_type,
            _ => return,
        };
        *field = Some(text);
    }

    fn is_directory(&self) -> bool {
        let of = self.resource_type.as_deref().unwrap_or_default();
        of.trim().eq_ignore_ascii_case("directory")
    }

    fn object(self, is_url_encoded: bool) -> Option<ObjectMeta> {
        let is_directory = self.is_directory();
        let mut path = name(self.key?, self.is_encoded, is_url_encoded)?;
        if is_directory && !path.ends_with('/') {
            path.push('/');
        }
        let size = match self.size {
            Some(size) => size.trim().parse().ok()?,
            None if is_directory => 0,
            None => return None,
        };
        let mtime_ns = self.modified.and_then(|text| times::parse(&text)).and_then(times::unix_ns);
        let etag = self.etag.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
        Some(ObjectMeta { path, size, mtime_ns, etag })
    }
}

#[cfg(test)]
mod tests;
