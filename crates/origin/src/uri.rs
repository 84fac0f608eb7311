//! Names of places at origins, in one normal form.

use crate::OriginError;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use url::Url;

const ACCEPTED: &str = "accepted are a path, file://, s3://bucket/prefix, az://container/prefix, gs://bucket/prefix and http(s)://host/prefix";
const PATH_BYTES_MAX: usize = 4096;

/// A directory, a prefix of a bucket or container, or a path of a plain HTTP server.
///
/// Normal form (`Display`): `file:///…` and `http(s)://…` percent-encoded, `s3://bucket/prefix`,
/// `az://container/prefix` and `gs://bucket/prefix` with the key as it is (as the cloud's own
/// tools do); no trailing slash, no `.`, `..` or empty component, never a user, password, query
/// or fragment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OriginUri(Place);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Place {
    /// Absolute.
    Local(PathBuf),
    /// `host` is a bucket, a container or a server (`host`, `host:port`); `path` is empty or clean.
    Store { scheme: Scheme, host: String, path: String },
}

/// How a store is spoken to.
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

    /// Whether it is a plain server: read-only, without a listing.
    pub fn is_plain(self) -> bool {
        matches!(self, Scheme::Http | Scheme::Https)
    }
}

/// Words that only signed URLs have.
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
    /// Reads a path (made absolute by the working directory, links not resolved) or a URI of one
    /// of the schemes.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for another scheme (the message names those accepted), `..`, a user
    /// or password, a signed URL, or a text that is none of these. Secrets are not repeated in it.
    pub fn parse(text: &str) -> Result<Self, OriginError> {
        if SIGNED.iter().any(|s| text.contains(s)) {
            return Err(OriginError::invalid(
                "a signed URL",
                "an origin URI holds no secrets; name the object plainly and configure [[origin]] credentials",
            ));
        }
        let Some((scheme, rest)) = split_scheme(text) else {
            return Self::local(Path::new(text));
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.contains('@') {
            return Err(OriginError::invalid(
                format!("{scheme}://…"),
                "a URI holds no user or password; use credentials of [[origin]]",
            ));
        }
        match scheme.to_ascii_lowercase().as_str() {
            "file" => file(text, host, path),
            "s3" => store(Scheme::S3, text, host, path),
            "az" => store(Scheme::Azure, text, host, path),
            "gs" => store(Scheme::Gcs, text, host, path),
            "http" => plain(Scheme::Http, text),
            "https" => plain(Scheme::Https, text),
            // The rest is not repeated: such a URL may carry a token.
            other => Err(OriginError::invalid(
                format!("{other}://…"),
                format!("is no origin of this build; {ACCEPTED}"),
            )),
        }
    }

    /// As [`OriginUri::parse`], for what a person types at a shell: `..` in a plain path is
    /// resolved through the file system.
    ///
    /// # Errors
    /// As `parse`; also when such a path does not exist.
    pub fn from_arg(text: &str) -> Result<Self, OriginError> {
        let path = Path::new(text);
        if split_scheme(text).is_none() && path.components().any(|c| c == Component::ParentDir) {
            let real = std::fs::canonicalize(path).map_err(|e| OriginError::io(text, &e))?;
            return Self::local(&real);
        }
        Self::parse(text)
    }

    /// A directory of this machine.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for an empty path, `..` or NUL, or without a working directory.
    pub fn local(path: &Path) -> Result<Self, OriginError> {
        let shown = path.display();
        if path.as_os_str().is_empty() {
            return Err(OriginError::invalid("an empty path", format!("names no origin; {ACCEPTED}")));
        }
        if path.as_os_str().as_encoded_bytes().contains(&0) {
            return Err(OriginError::invalid(shown, "a path holds no NUL"));
        }
        if path.components().any(|c| c == Component::ParentDir) {
            return Err(OriginError::invalid(shown, "a path to an origin holds no `..`"));
        }
        let path = std::path::absolute(path).map_err(|e| OriginError::invalid(shown, e))?;
        // Collecting components drops `.`, doubled and trailing slashes.
        Ok(OriginUri(Place::Local(path.components().collect())))
    }

    /// The place `rel` below this one.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] unless `rel` is a clean relative path.
    pub fn join(&self, rel: &str) -> Result<Self, OriginError> {
        check_path(rel)?;
        Ok(OriginUri(match &self.0 {
            Place::Local(dir) => Place::Local(dir.join(rel)),
            Place::Store { scheme, host, path } => {
                let path = if path.is_empty() { rel.to_owned() } else { format!("{path}/{rel}") };
                Place::Store { scheme: *scheme, host: host.clone(), path }
            }
        }))
    }

    /// The directory, where it is one of this machine.
    #[must_use]
    pub fn as_local(&self) -> Option<&Path> {
        match &self.0 {
            Place::Local(path) => Some(path),
            Place::Store { .. } => None,
        }
    }

    /// Whether it is a plain HTTP server: read-only, and without a listing, so that a list of names
    /// must be given to index it.
    #[must_use]
    pub fn is_plain_http(&self) -> bool {
        matches!(&self.0, Place::Store { scheme, .. } if scheme.is_plain())
    }

    /// Whether `other` is this place or lies below it. By names alone: links are not resolved.
    #[must_use]
    pub fn contains(&self, other: &OriginUri) -> bool {
        match (&self.0, &other.0) {
            (Place::Local(a), Place::Local(b)) => b.starts_with(a),
            (Place::Store { scheme: s, host: a, path: p }, Place::Store { scheme: t, host: b, path: q }) => {
                (s, a) == (t, b)
                    && (p.is_empty()
                        || q.strip_prefix(p.as_str()).is_some_and(|r| r.is_empty() || r.starts_with('/')))
            }
            _ => false,
        }
    }

    /// The path of this place below `base` (empty for `base` itself), if it lies there. By names
    /// alone; none where a local name is not UTF-8.
    #[must_use]
    pub fn below(&self, base: &OriginUri) -> Option<String> {
        if !base.contains(self) {
            return None;
        }
        match (&base.0, &self.0) {
            (Place::Local(a), Place::Local(b)) => b.strip_prefix(a).ok()?.to_str().map(str::to_owned),
            (Place::Store { path: a, .. }, Place::Store { path: b, .. }) => {
                Some(b[a.len()..].trim_start_matches('/').to_owned())
            }
            _ => None,
        }
    }

    pub(crate) fn scheme(&self) -> Option<Scheme> {
        match &self.0 {
            Place::Local(_) => None,
            Place::Store { scheme, .. } => Some(*scheme),
        }
    }

    pub(crate) fn place(&self) -> &Place {
        &self.0
    }

    /// Its length, to compare prefixes of one place with.
    pub(crate) fn length(&self) -> usize {
        match &self.0 {
            Place::Local(path) => path.as_os_str().len(),
            Place::Store { host, path, .. } => host.len() + path.len(),
        }
    }
}

/// `scheme://rest`, where the text begins with a scheme.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let fits = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    fits.then_some((scheme, rest))
}

fn file(text: &str, host: &str, path: &str) -> Result<OriginUri, OriginError> {
    if !host.is_empty() && host != "localhost" {
        return Err(OriginError::invalid(text, "a file:// URI names no host; write file:///absolute/path"));
    }
    // The URL parser resolves dots silently, encoded ones too, so they are looked for before.
    if path.split('/').any(|c| matches!(c.to_ascii_lowercase().replace("%2e", ".").as_str(), "." | "..")) {
        return Err(OriginError::invalid(text, "a path to an origin holds no `.` or `..`"));
    }
    let url = Url::parse(text).map_err(|e| OriginError::invalid(text, e))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(OriginError::invalid(text, "write `?` and `#` in a file:// URI as %3F and %23"));
    }
    let path = url.to_file_path().map_err(|()| OriginError::invalid(text, "this is no absolute path"))?;
    OriginUri::local(&path)
}

fn store(scheme: Scheme, text: &str, host: &str, path: &str) -> Result<OriginUri, OriginError> {
    let (length, more, why) = match scheme {
        Scheme::Azure => (
            3..=63,
            b"-$".as_slice(),
            "az:// is followed by the name of a container: 3-63 lower-case letters, digits, dashes",
        ),
        _ => (
            3..=255,
            b".-_".as_slice(),
            "a scheme is followed by the name of a bucket: 3-255 letters, digits, dots, dashes",
        ),
    };
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
    Ok(OriginUri(Place::Store { scheme, host: host.to_owned(), path: path.to_owned() }))
}

fn plain(scheme: Scheme, text: &str) -> Result<OriginUri, OriginError> {
    // Not repeated before it is known to hold no secret.
    let hidden = || format!("{}://…", scheme.as_str());
    let rest = text.split_once("://").map_or("", |(_, rest)| rest);
    if rest.contains(['?', '#']) {
        return Err(OriginError::invalid(
            hidden(),
            "an origin URL has no query and no fragment; write `?` and `#` in a name as %3F and %23",
        ));
    }
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.is_empty() {
        return Err(OriginError::invalid(text, "a URL names a host"));
    }
    let url = Url::parse(&format!("{}://{authority}", scheme.as_str()))
        .map_err(|e| OriginError::invalid(text, format!("its host: {e}")))?;
    // The parser has made the host lower-case and dropped the scheme's own port.
    let host = match (url.host_str(), url.port()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        (Some(host), None) => host.to_owned(),
        (None, _) => return Err(OriginError::invalid(text, "a URL names a host")),
    };
    let mut names = Vec::new();
    for name in path.trim_end_matches('/').split('/') {
        let name = percent_decode_str(name)
            .decode_utf8()
            .map_err(|_| OriginError::invalid(text, "a name in it is not UTF-8"))?;
        if name.contains('/') {
            return Err(OriginError::invalid(text, "%2F: a name holds no slash"));
        }
        names.push(name);
    }
    let path = names.join("/");
    if !path.is_empty() {
        check_path(&path)?;
    }
    Ok(OriginUri(Place::Store { scheme, host, path }))
}

/// A place of a plain server as a URL, names encoded.
fn encoded(scheme: Scheme, host: &str, path: &str) -> Option<String> {
    let mut url = Url::parse(&format!("{}://{host}", scheme.as_str())).ok()?;
    url.path_segments_mut().ok()?.clear().extend(path.split('/'));
    Some(url.as_str().trim_end_matches('/').to_owned())
}

/// Checks a path below an origin: relative, no empty, `.` or `..` component, no NUL, bounded.
pub(crate) fn check_path(path: &str) -> Result<(), OriginError> {
    let why = if path.is_empty() {
        "an empty path names no object"
    } else if path.len() > PATH_BYTES_MAX {
        "the path is longer than 4096 bytes"
    } else if path.contains('\0') {
        "a path holds no NUL"
    } else if path.starts_with('/') {
        "the path is not relative"
    } else if path.split('/').any(|c| matches!(c, "" | "." | "..")) {
        "the path has an empty, `.` or `..` component"
    } else {
        return Ok(());
    };
    Err(OriginError::invalid(format!("{:?}", path.chars().take(200).collect::<String>()), why))
}

impl fmt::Display for OriginUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::Local(path) => match Url::from_file_path(path) {
                Ok(url) if path.as_os_str() == "/" => f.write_str(url.as_str()),
                Ok(url) => f.write_str(url.as_str().trim_end_matches('/')),
                // Cannot happen: the path is absolute.
                Err(()) => write!(f, "file://{}", path.display()),
            },
            Place::Store { scheme, host, path } => {
                let word = scheme.as_str();
                match encoded(*scheme, host, path).filter(|_| scheme.is_plain()) {
                    Some(url) => f.write_str(&url),
                    None if path.is_empty() => write!(f, "{word}://{host}"),
                    None => write!(f, "{word}://{host}/{path}"),
                }
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
