//! The URIs of origins: parses them into one normal form.

use crate::OriginError;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use url::Url;

const ACCEPTED: &str = "use a path, file://, s3://bucket/prefix, az://container/prefix, \
                        gs://bucket/prefix or http(s)://host/prefix";
const PATH_BYTES_MAX: usize = 4096;
/// Parts a bucket from the name of its store. No name of a bucket or container contains it.
const AT_STORE: char = '~';
/// The longest name of a store, in bytes.
const STORE_BYTES_MAX: usize = 512;

/// The URI of a directory, of a prefix of a bucket or container, or of a path at a plain HTTP server.
///
/// `Display` gives the normal form. `file:///…` and `http(s)://…` are percent-encoded. `s3://bucket/prefix`,
/// `az://container/prefix` and `gs://bucket/prefix` have the key unencoded, as the cloud's own tools do.
/// There is no trailing slash, no `.`, `..` or empty component, and never a user, password, query or
/// fragment.
///
/// `s3://bucket~STORE/prefix` is the bucket of that name at the store STORE
/// ([`OriginConfig::store_of`](crate::OriginConfig::store_of)). Without a store, the settings or the
/// environment say which store it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OriginUri(Address);

/// The parts of an [`OriginUri`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Address {
    /// An absolute path.
    Local(PathBuf),
    /// `host` is a bucket, a container or a server (`host`, `host:port`).
    ///
    /// `store` is the name of the store that the bucket or container is at, if the URI says so. `path` is
    /// empty or a clean relative path.
    Store { scheme: Scheme, host: String, store: Option<String>, path: String },
}

/// The protocol of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Scheme {
    S3,
    Azure,
    Gcs,
    Http,
    Https,
}

impl Scheme {
    pub fn as_str(self) -> &'static str {
        match self {
            Scheme::S3 => "s3",
            Scheme::Azure => "az",
            Scheme::Gcs => "gs",
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// Returns whether it is a plain server: read-only and without a listing.
    pub fn is_plain(self) -> bool {
        matches!(self, Scheme::Http | Scheme::Https)
    }
}

/// Texts that occur only in signed URLs.
const SIGNED: &[&str] = &[
    "X-Amz-Signature",
    "X-Amz-Credential",
    "AWSAccessKeyId=",
    "X-Goog-Signature",
    "X-Goog-Credential",
    "?sig=",
    "&sig=",
];

impl OriginUri {
    /// Parses a path or a URI. A relative path is taken from the working directory; links are not resolved.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for an unknown scheme, `..`, a user or password, or a signed URL. The error
    /// never repeats a secret.
    pub fn parse(text: &str) -> Result<Self, OriginError> {
        if SIGNED.iter().any(|s| text.contains(s)) {
            return Err(OriginError::invalid(
                "a signed URL",
                "an origin URI must not contain a signature; set credentials in [[origin]]",
            ));
        }
        let Some((scheme, rest)) = split_scheme(text) else {
            return Self::local(Path::new(text));
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.contains('@') {
            return Err(OriginError::invalid(
                format!("{scheme}://…"),
                "the URI must not contain a user or password; set credentials in [[origin]]",
            ));
        }
        match scheme.to_ascii_lowercase().as_str() {
            "file" => file(text, host, path),
            "s3" => store(Scheme::S3, text, host, path),
            "az" => store(Scheme::Azure, text, host, path),
            "gs" => store(Scheme::Gcs, text, host, path),
            "http" => plain(Scheme::Http, text),
            "https" => plain(Scheme::Https, text),
            // Without the rest of the URL, which may contain a token.
            other => Err(OriginError::invalid(
                format!("{other}://…"),
                format!("the scheme is not supported; {ACCEPTED}"),
            )),
        }
    }

    /// Parses a command line argument, as [`OriginUri::parse`], but resolves `..` of a path.
    ///
    /// # Errors
    /// As `parse`, and if a path with `..` does not exist.
    pub fn from_arg(text: &str) -> Result<Self, OriginError> {
        let path = Path::new(text);
        if split_scheme(text).is_none() && path.components().any(|c| c == Component::ParentDir) {
            let real = std::fs::canonicalize(path).map_err(|e| OriginError::io(text, &e))?;
            return Self::local(&real);
        }
        Self::parse(text)
    }

    /// Returns the URI of a directory of this machine.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for an empty path, `..` or NUL, or without a working directory.
    pub fn local(path: &Path) -> Result<Self, OriginError> {
        let shown = path.display();
        if path.as_os_str().is_empty() {
            return Err(OriginError::invalid(
                "an empty path",
                format!("an origin needs a path or a URI; {ACCEPTED}"),
            ));
        }
        if path.as_os_str().as_encoded_bytes().contains(&0) {
            return Err(OriginError::invalid(shown, "the path must not contain a NUL byte"));
        }
        if path.components().any(|c| c == Component::ParentDir) {
            return Err(OriginError::invalid(shown, "the path of an origin must not contain `..`"));
        }
        let path = std::path::absolute(path).map_err(|e| OriginError::invalid(shown, e))?;
        // Collecting the components removes `.`, repeated and trailing slashes.
        Ok(OriginUri(Address::Local(path.components().collect())))
    }

    /// Returns the URI of the path `rel` below this URI.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] unless `rel` is a clean relative path.
    pub fn join(&self, rel: &str) -> Result<Self, OriginError> {
        check_path(rel)?;
        Ok(OriginUri(match &self.0 {
            Address::Local(dir) => Address::Local(dir.join(rel)),
            Address::Store { scheme, host, store, path } => {
                if scheme.is_plain() {
                    check_plain_path(rel)?;
                }
                let path = if path.is_empty() { rel.to_owned() } else { format!("{path}/{rel}") };
                Address::Store { scheme: *scheme, host: host.clone(), store: store.clone(), path }
            }
        }))
    }

    /// Returns the directory, if the URI is a local one.
    #[must_use]
    pub fn as_local(&self) -> Option<&Path> {
        match &self.0 {
            Address::Local(path) => Some(path),
            Address::Store { .. } => None,
        }
    }

    /// Returns whether the URI is at a plain HTTP server: read-only, and indexed only with a list of names.
    #[must_use]
    pub fn is_plain_http(&self) -> bool {
        matches!(&self.0, Address::Store { scheme, .. } if scheme.is_plain())
    }

    /// Returns whether `other` is this URI or lies below it. Does not resolve links.
    #[must_use]
    pub fn contains(&self, other: &OriginUri) -> bool {
        match (&self.0, &other.0) {
            (Address::Local(a), Address::Local(b)) => b.starts_with(a),
            (
                Address::Store { scheme: s, host: a, store: at, path: p },
                Address::Store { scheme: t, host: b, store: other, path: q },
            ) => {
                (s, a, at) == (t, b, other)
                    && (p.is_empty()
                        || q.strip_prefix(p.as_str()).is_some_and(|r| r.is_empty() || r.starts_with('/')))
            }
            _ => false,
        }
    }

    /// Returns the path of this URI below `base`, empty for `base` itself. Does not resolve links.
    ///
    /// Returns `None` if the URI does not lie below `base`, or if a local name is not UTF-8.
    #[must_use]
    pub fn below(&self, base: &OriginUri) -> Option<String> {
        if !base.contains(self) {
            return None;
        }
        match (&base.0, &self.0) {
            (Address::Local(a), Address::Local(b)) => b.strip_prefix(a).ok()?.to_str().map(str::to_owned),
            (Address::Store { path: a, .. }, Address::Store { path: b, .. }) => {
                Some(b[a.len()..].trim_start_matches('/').to_owned())
            }
            _ => None,
        }
    }

    /// Returns the URI of the bucket, the container or the server. `None` for a directory.
    #[must_use]
    pub fn top(&self) -> Option<OriginUri> {
        match &self.0 {
            Address::Local(_) => None,
            Address::Store { scheme, host, store, .. } => {
                let (scheme, host, store) = (*scheme, host.clone(), store.clone());
                Some(OriginUri(Address::Store { scheme, host, store, path: String::new() }))
            }
        }
    }

    /// Returns the name of the store, if the URI says at which store its bucket or container is.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        match &self.0 {
            Address::Local(_) => None,
            Address::Store { store, .. } => store.as_deref(),
        }
    }

    /// Returns the same bucket or container and prefix at the store of that name; `None` names no store.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for a directory or a plain server, which are at no store, and for a text that
    /// is no name of a store.
    pub fn at_store(&self, name: Option<&str>) -> Result<Self, OriginError> {
        match (&self.0, name) {
            (Address::Store { scheme, host, path, .. }, name) if !scheme.is_plain() => {
                if let Some(name) = name {
                    check_store(name)?;
                }
                let (scheme, host, path) = (*scheme, host.clone(), path.clone());
                Ok(OriginUri(Address::Store { scheme, host, store: name.map(str::to_owned), path }))
            }
            (_, None) => Ok(self.clone()),
            (_, Some(_)) => Err(OriginError::invalid(self, "only a bucket or a container is at a store")),
        }
    }

    /// Returns the same bucket or container and prefix, without the name of a store.
    #[must_use]
    pub fn without_store(&self) -> Self {
        let mut uri = self.clone();
        if let Address::Store { store, .. } = &mut uri.0 {
            *store = None;
        }
        uri
    }

    pub(crate) fn scheme(&self) -> Option<Scheme> {
        match &self.0 {
            Address::Local(_) => None,
            Address::Store { scheme, .. } => Some(*scheme),
        }
    }

    pub(crate) fn address(&self) -> &Address {
        &self.0
    }

    /// Returns a length by which prefixes of one URI can be compared.
    pub(crate) fn length(&self) -> usize {
        match &self.0 {
            Address::Local(path) => path.as_os_str().len(),
            Address::Store { host, path, .. } => host.len() + path.len(),
        }
    }
}

/// Splits `scheme://rest`, if the text begins with a scheme.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let fits = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    fits.then_some((scheme, rest))
}

fn file(text: &str, host: &str, path: &str) -> Result<OriginUri, OriginError> {
    if !host.is_empty() && host != "localhost" {
        return Err(OriginError::invalid(
            text,
            "a file:// URI must not name a host; write file:///absolute/path",
        ));
    }
    // Checked here because the URL parser resolves dots silently, encoded ones too.
    if path.split('/').any(|c| matches!(c.to_ascii_lowercase().replace("%2e", ".").as_str(), "." | "..")) {
        return Err(OriginError::invalid(text, "the path of an origin must not contain `.` or `..`"));
    }
    let url = Url::parse(text).map_err(|e| OriginError::invalid(text, e))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(OriginError::invalid(text, "write `?` and `#` in a file:// URI as %3F and %23"));
    }
    let path = url.to_file_path().map_err(|()| OriginError::invalid(text, "the path is not absolute"))?;
    OriginUri::local(&path)
}

fn store(scheme: Scheme, text: &str, host: &str, path: &str) -> Result<OriginUri, OriginError> {
    let (length, more, why) = match scheme {
        Scheme::Azure => (
            3..=63,
            b"-$".as_slice(),
            "the name of a container has 3-63 characters: lower-case letters, digits and dashes",
        ),
        _ => (
            3..=255,
            b".-_".as_slice(),
            "the name of a bucket has 3-255 characters: letters, digits, dots and dashes",
        ),
    };
    let (host, store) = match host.split_once(AT_STORE) {
        Some((host, store)) => (host, Some(store)),
        None => (host, None),
    };
    if let Some(store) = store {
        check_store(store)?;
    }
    let upper = scheme != Scheme::Azure;
    let fits = length.contains(&host.len())
        && host.bytes().all(|b| {
            b.is_ascii_lowercase()
                || b.is_ascii_digit()
                || (upper && b.is_ascii_uppercase())
                || more.contains(&b)
        });
    if !fits {
        return Err(OriginError::invalid(text, why));
    }
    let path = path.trim_end_matches('/');
    if !path.is_empty() {
        check_path(path)?;
    }
    let (host, store, path) = (host.to_owned(), store.map(str::to_owned), path.to_owned());
    Ok(OriginUri(Address::Store { scheme, host, store, path }))
}

/// Checks the name of a store: a host and a port, and what else tells stores apart.
fn check_store(name: &str) -> Result<(), OriginError> {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:+%[]".contains(&b);
    if !name.is_empty() && name.len() <= STORE_BYTES_MAX && name.bytes().all(is_plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(200).collect();
    let why = format!("after `{AT_STORE}` follows the name of a store, such as minio.example:9000");
    Err(OriginError::invalid(format!("{shown:?}"), why))
}

fn plain(scheme: Scheme, text: &str) -> Result<OriginUri, OriginError> {
    // The URL is not shown before it is known to contain no secret.
    let hidden = || format!("{}://…", scheme.as_str());
    let rest = text.split_once("://").map_or("", |(_, rest)| rest);
    if rest.contains(['?', '#']) {
        return Err(OriginError::invalid(
            hidden(),
            "the URL must not contain a query or a fragment; write `?` and `#` in a name as %3F and %23",
        ));
    }
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.is_empty() {
        return Err(OriginError::invalid(text, "the URL has no host"));
    }
    let url = Url::parse(&format!("{}://{authority}", scheme.as_str()))
        .map_err(|e| OriginError::invalid(text, format!("the host is not valid: {e}")))?;
    // The parser made the host lower-case and removed the scheme's default port.
    let host = match (url.host_str(), url.port()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        (Some(host), None) => host.to_owned(),
        (None, _) => return Err(OriginError::invalid(text, "the URL has no host")),
    };
    let mut names = Vec::new();
    for name in path.trim_end_matches('/').split('/') {
        let name = percent_decode_str(name)
            .decode_utf8()
            .map_err(|_| OriginError::invalid(text, "a name in the path is not UTF-8"))?;
        if name.contains('/') {
            return Err(OriginError::invalid(text, "a name must not contain a slash (%2F)"));
        }
        names.push(name);
    }
    let path = names.join("/");
    if !path.is_empty() {
        check_path(&path)?;
        check_plain_path(&path)?;
    }
    Ok(OriginUri(Address::Store { scheme, host, store: None, path }))
}

/// Returns the URL of a path at a plain server, with the names encoded.
fn encoded(scheme: Scheme, host: &str, path: &str) -> Option<String> {
    let mut url = Url::parse(&format!("{}://{host}", scheme.as_str())).ok()?;
    url.path_segments_mut().ok()?.clear().extend(path.split('/'));
    Some(url.as_str().trim_end_matches('/').to_owned())
}

/// Returns whether a key of a store is a path that [`Origin::get`](crate::Origin::get) accepts: relative,
/// without empty, `.` or `..` components or NUL, at most 4096 bytes.
#[must_use]
pub fn is_path(key: &str) -> bool {
    check_path(key).is_ok()
}

/// Checks a path below an origin: relative, without empty, `.` or `..` components or NUL, at most 4096 bytes.
pub(crate) fn check_path(path: &str) -> Result<(), OriginError> {
    let why = if path.is_empty() {
        "the path is empty"
    } else if path.len() > PATH_BYTES_MAX {
        "the path is longer than 4096 bytes"
    } else if path.contains('\0') {
        "the path must not contain a NUL byte"
    } else if path.starts_with('/') {
        "the path must be relative"
    } else if path.split('/').any(|c| matches!(c, "" | "." | "..")) {
        "the path has an empty, `.` or `..` component"
    } else {
        return Ok(());
    };
    Err(OriginError::invalid(format!("{:?}", path.chars().take(200).collect::<String>()), why))
}

/// Checks a path at a plain server, beside [`check_path`].
///
/// The parser of URLs drops tabs and line breaks, encoded or not, after the path was checked. So `.\t.` would
/// become `..` and lead out of the prefix.
pub(crate) fn check_plain_path(path: &str) -> Result<(), OriginError> {
    if !path.contains(['\t', '\n', '\r']) {
        return Ok(());
    }
    let why = "a name at a plain HTTP server must not contain a tab or a line break";
    Err(OriginError::invalid(format!("{:?}", path.chars().take(200).collect::<String>()), why))
}

impl fmt::Display for OriginUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Address::Local(path) => match Url::from_file_path(path) {
                Ok(url) if path.as_os_str() == "/" => f.write_str(url.as_str()),
                Ok(url) => f.write_str(url.as_str().trim_end_matches('/')),
                // Unreachable: the path is absolute.
                Err(()) => write!(f, "file://{}", path.display()),
            },
            Address::Store { scheme, host, store, path } => {
                if let Some(url) = encoded(*scheme, host, path).filter(|_| scheme.is_plain()) {
                    return f.write_str(&url);
                }
                write!(f, "{}://{host}", scheme.as_str())?;
                if let Some(store) = store {
                    write!(f, "{AT_STORE}{store}")?;
                }
                if path.is_empty() { Ok(()) } else { write!(f, "/{path}") }
            }
        }
    }
}

impl FromStr for OriginUri {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        Self::parse(text)
    }
}

impl TryFrom<String> for OriginUri {
    type Error = OriginError;

    fn try_from(text: String) -> Result<Self, OriginError> {
        Self::parse(&text)
    }
}

impl From<OriginUri> for String {
    fn from(uri: OriginUri) -> String {
        uri.to_string()
    }
}

#[cfg(test)]
mod tests;
