//! The parameters of a listing, and its XML.

use super::{
    error::{S3Code, S3Error, S3Result},
    list::{Item, ListedObject, Listing, Page, page},
    query::{Query, url_encoded},
    token::Continuation,
    xml::{self, Document, NotInXml},
};
use crate::{app::server::Server, tenancy::auth::Principal};
use axum::{
    http::header,
    response::{IntoResponse as _, Response},
};
use fletch_tables::documents::rfc3339;
use std::{
    borrow::Cow,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// The most keys and common prefixes of a page.
const KEYS_MAX: usize = 1000;
/// The owner of every object.
const OWNER: &str = "fletch";

/// The parameters of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parameters<'a> {
    listing: Listing,
    is_v2: bool,
    /// Whether keys are percent-encoded.
    is_encoded: bool,
    has_owner: bool,
    query: &'a Query,
}

impl<'a> Parameters<'a> {
    fn read(query: &'a Query, is_v2: bool) -> S3Result<Self> {
        let invalid = |why| S3Error::new(S3Code::InvalidArgument, why);
        let max = match query.get("max-keys").filter(|max| !max.is_empty()) {
            None => KEYS_MAX,
            Some(max) => {
                let max: u32 = max.parse().map_err(|_| invalid("max-keys is not a number from 0 on"))?;
                KEYS_MAX.min(usize::try_from(max).unwrap_or(KEYS_MAX))
            }
        };
        let is_encoded = match query.get("encoding-type").filter(|encoding| !encoding.is_empty()) {
            None => false,
            Some("url") => true,
            Some(_) => return Err(invalid("encoding-type must be url")),
        };
        let mut listing = Listing {
            prefix: query.get("prefix").unwrap_or("").to_owned(),
            delimiter: query.get("delimiter").filter(|d| !d.is_empty()).map(str::to_owned),
            max,
            begin: Continuation::default(),
        };
        let after = query.get(if is_v2 { "start-after" } else { "marker" }).filter(|key| !key.is_empty());
        match query.get("continuation-token").filter(|token| is_v2 && !token.is_empty()) {
            Some(token) => {
                let begin = Continuation::read(token);
                listing.begin =
                    begin.ok_or_else(|| invalid("the continuation token is not of this server"))?;
            }
            None => after.into_iter().for_each(|key| listing.begin_after(key)),
        }
        let has_owner = !is_v2 || query.get("fetch-owner") == Some("true");
        Ok(Parameters { listing, is_v2, is_encoded, has_owner, query })
    }

    fn shown<'b>(&self, key: &'b str) -> Cow<'b, str> {
        if self.is_encoded { url_encoded(key).into() } else { key.into() }
    }
}

/// Returns whether a query is that of a listing.
pub fn is_valid(query: &Query, is_v2: bool) -> bool {
    Parameters::read(query, is_v2).is_ok()
}

/// Answers a request for a listing.
///
/// # Errors
/// [`S3Code::InvalidArgument`] for a parameter, and for a key that XML cannot hold; those of [`page`].
pub async fn reply(
    server: &Arc<Server>,
    principal: &Principal,
    query: &Query,
    is_v2: bool,
    bucket: &str,
) -> S3Result {
    let parameters = Parameters::read(query, is_v2)?;
    let page = page(server, principal, &parameters.listing).await?;
    let document = document(&parameters, &page, bucket).map_err(|NotInXml| {
        let why = "a key has a character that XML cannot hold: ask with encoding-type=url";
        S3Error::new(S3Code::InvalidArgument, why)
    })?;
    Ok(of_xml(document))
}

/// Returns the reply with a document.
pub fn of_xml(document: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, xml::TYPE)], document).into_response()
}

fn document(parameters: &Parameters<'_>, page: &Page, bucket: &str) -> Result<Vec<u8>, NotInXml> {
    let Parameters { listing, is_v2, query, .. } = parameters;
    let mut out = Document::new("ListBucketResult", true);
    out.text("Name", bucket);
    out.escaped("Prefix", &parameters.shown(&listing.prefix))?;
    out.text("MaxKeys", &listing.max.to_string());
    if let Some(delimiter) = &listing.delimiter {
        out.escaped("Delimiter", &parameters.shown(delimiter))?;
    }
    if parameters.is_encoded {
        out.text("EncodingType", "url");
    }
    out.text("IsTruncated", if page.next.is_some() { "true" } else { "false" });
    match is_v2 {
        true => {
            out.text("KeyCount", &page.items.len().to_string());
            if let Some(token) = query.get("continuation-token") {
                out.escaped("ContinuationToken", token)?;
            }
            if let Some(next) = &page.next {
                out.text("NextContinuationToken", &next.to_token());
            }
            if let Some(after) = query.get("start-after") {
                out.escaped("StartAfter", &parameters.shown(after))?;
            }
        }
        false => {
            out.escaped("Marker", &parameters.shown(query.get("marker").unwrap_or("")))?;
            // Without a delimiter, clients go on after the last key.
            let last = page.items.last().filter(|_| page.next.is_some() && listing.delimiter.is_some());
            if let Some(last) = last {
                out.escaped("NextMarker", &parameters.shown(last.text()))?;
            }
        }
    }
    for item in &page.items {
        match item {
            Item::Object(object) => contents(&mut out, parameters, object)?,
            Item::Prefix(prefix) => {
                out.open("CommonPrefixes");
                out.escaped("Prefix", &parameters.shown(prefix))?;
                out.close("CommonPrefixes");
            }
        }
    }
    Ok(out.end())
}

fn contents(out: &mut Document, parameters: &Parameters<'_>, object: &ListedObject) -> Result<(), NotInXml> {
    out.open("Contents");
    out.escaped("Key", &parameters.shown(&object.key))?;
    out.text("LastModified", &timestamp(object.modified));
    out.text("ETag", &format!("&quot;{}&quot;", object.hash));
    out.text("Size", &object.size.to_string());
    out.text("StorageClass", "STANDARD");
    if parameters.has_owner {
        owner(out);
    }
    out.close("Contents");
    Ok(())
}

fn owner(out: &mut Document) {
    out.open("Owner");
    out.text("ID", OWNER);
    out.text("DisplayName", OWNER);
    out.close("Owner");
}

/// Returns a time as S3's documents have it, with milliseconds.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let text = rfc3339(seconds.saturating_mul(1_000_000_000));
    format!("{}.000Z", text.get(..19).unwrap_or(&text))
}

/// Returns the list of the one bucket. `since` is when the server started.
pub fn buckets(bucket: &str, since: SystemTime) -> Vec<u8> {
    let mut out = Document::new("ListAllMyBucketsResult", true);
    owner(&mut out);
    out.open("Buckets");
    out.open("Bucket");
    out.text("Name", bucket);
    out.text("CreationDate", &timestamp(since));
    out.close("Bucket");
    out.close("Buckets");
    out.end()
}

/// Returns the location of the bucket, which is empty: that of S3's first region.
pub fn location() -> Vec<u8> {
    Document::new("LocationConstraint", true).end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str, is_v2: bool) -> Result<Listing, S3Code> {
        let query = Query::read(query).expect("a query");
        Parameters::read(&query, is_v2).map(|p| p.listing).map_err(|e| e.code)
    }

    #[test]
    fn parameters_have_their_bounds() {
        let max = |query: &str| read(query, true).map(|listing| listing.max);
        assert_eq!((max(""), max("max-keys=")), (Ok(1000), Ok(1000)));
        assert_eq!((max("max-keys=0"), max("max-keys=7"), max("max-keys=9999")), (Ok(0), Ok(7), Ok(1000)));
        for bad in ["max-keys=x", "max-keys=-1", "max-keys=1.5", "encoding-type=xml", "continuation-token=x"]
        {
            assert_eq!(read(bad, true), Err(S3Code::InvalidArgument), "{bad}");
        }
        assert_eq!(read("delimiter=", true).expect("valid").delimiter, None);
        assert!(read("continuation-token=", true).is_ok() && read("continuation-token=x", false).is_ok());
    }

    #[test]
    fn a_listing_goes_on_after_a_key_or_after_all_keys_of_its_common_prefix() {
        let from = |query: &str, is_v2| read(query, is_v2).expect("valid").begin.from;
        assert_eq!(from("marker=d/a", false), b"d/a\0");
        assert_eq!(from("start-after=d/a", true), b"d/a\0");
        assert_eq!(from("marker=d/a/b&delimiter=/&prefix=d/", false), b"d/a0");
        assert_eq!(from("marker=d/a/&delimiter=/&prefix=d/", false), b"d/a0");
        assert_eq!(from("marker=d/a&delimiter=/&prefix=d/", false), b"d/a\0");
        assert_eq!(from("marker=c/a/b&delimiter=/&prefix=d/", false), b"c/a/b\0");
        assert_eq!(from("start-after=d/a&marker=x", false), b"x\0");
        let token = Continuation { root: None, from: b"k".to_vec() }.to_token();
        assert_eq!(from(&format!("continuation-token={token}&start-after=z"), true), b"k");
    }

    #[test]
    fn a_page_is_the_document_that_clients_parse() {
        let query = Query::read("prefix=d/&delimiter=/&list-type=2").expect("a query");
        let parameters = Parameters::read(&query, true).expect("valid");
        let modified = UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        let object = |key: &str| {
            Item::Object(ListedObject { key: key.to_owned(), size: 7, hash: "ab".repeat(32), modified })
        };
        let next = Some(Continuation { root: None, from: b"d/e".to_vec() });
        let page = Page { items: vec![object("d/a&b"), Item::Prefix("d/c/".to_owned())], next };
        let text = String::from_utf8(document(&parameters, &page, "fletch").expect("XML")).expect("UTF-8");
        for part in [
            "<Name>fletch</Name><Prefix>d/</Prefix><MaxKeys>1000</MaxKeys><Delimiter>/</Delimiter>",
            "<IsTruncated>true</IsTruncated><KeyCount>2</KeyCount><NextContinuationToken>AQ",
            "<Key>d/a&amp;b</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified><ETag>&quot;abab",
            "<Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>",
            "<CommonPrefixes><Prefix>d/c/</Prefix></CommonPrefixes></ListBucketResult>",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let page = Page { items: vec![object("d/\u{1}")], next: None };
        assert_eq!(document(&parameters, &page, "fletch"), Err(NotInXml));
        let query = Query::read("encoding-type=url&marker=d/%01").expect("a query");
        let parameters = Parameters::read(&query, false).expect("valid");
        let text = String::from_utf8(document(&parameters, &page, "fletch").expect("XML")).expect("UTF-8");
        assert!(text.contains("<Key>d/%01</Key>") && text.contains("<Marker>d/%01</Marker>"), "{text}");
        assert!(text.contains("<Owner><ID>fletch</ID>"), "{text}");
    }
}
