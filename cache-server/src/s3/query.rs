//! Queries and paths of S3 requests: percent-decoding, and the one form in which they are signed.

use super::error::{S3Code, S3Error, S3Result};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};

/// What is percent-encoded in a part of a query.
const PART: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// What is percent-encoded in a path.
const PATH: &AsciiSet = &PART.remove(b'/');

/// A query: names and values, decoded, in the order of the request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Reads the text after the `?`.
    ///
    /// # Errors
    /// [`S3Code::InvalidURI`] for a part that is not UTF-8.
    pub fn read(text: &str) -> S3Result<Self> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decoded(&name.replace('+', " "))?, decoded(&value.replace('+', " "))?))
        });
        Ok(Query(pairs.collect::<S3Result<_>>()?))
    }

    /// Returns the first value of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns whether the query has the name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns all names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the form in which the query is signed, without the parameter `except`.
    #[must_use]
    pub fn canonical(&self, except: &str) -> String {
        let encoded = |text: &str| percent_encode(text.as_bytes(), PART).to_string();
        let kept = self.0.iter().filter(|(name, _)| name != except);
        let mut pairs: Vec<_> = kept.map(|(name, value)| (encoded(name), encoded(value))).collect();
        pairs.sort();
        let pairs: Vec<_> = pairs.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        pairs.join("&")
    }
}

/// Returns the form in which a path is signed.
#[must_use]
pub fn canonical_path(decoded: &str) -> String {
    percent_encode(decoded.as_bytes(), PATH).to_string()
}

/// Returns a key as a list with `encoding-type=url` shows it.
#[must_use]
pub fn url_encoded(key: &str) -> String {
    canonical_path(key)
}

/// Percent-decodes a text.
///
/// # Errors
/// [`S3Code::InvalidURI`] if it is not UTF-8 then.
pub fn decoded(text: &str) -> S3Result<String> {
    let decoded = percent_decode(text.as_bytes()).decode_utf8();
    decoded.map(Into::into).map_err(|_| S3Error::new(S3Code::InvalidURI, "the URI is not UTF-8 when decoded"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_signed_in_one_form() {
        let query =
            Query::read("prefix=a%2Fb+c&list-type=2&acl&X-Amz-Signature=00&prefix=%C3%A9~").expect("valid");
        assert_eq!(query.get("prefix"), Some("a/b c"));
        assert!(query.has("acl") && !query.has("list"));
        assert_eq!(query.names().count(), 5);
        let signed = "acl=&list-type=2&prefix=%C3%A9~&prefix=a%2Fb%20c";
        assert_eq!(query.canonical("X-Amz-Signature"), signed);
        assert_eq!(Query::read("").expect("empty"), Query::default());
        assert_eq!(Query::read("a=%ff").map_err(|e| e.code), Err(S3Code::InvalidURI));
        assert_eq!(canonical_path("/fletch/a b/é+*~"), "/fletch/a%20b/%C3%A9%2B%2A~");
    }
}
