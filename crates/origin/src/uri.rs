//! Names of places at origins, in one normal form.

use crate::OriginError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use url::Url;

const ACCEPTED: &str = "accepted are a path, file:// and s3://bucket/prefix";
const PATH_BYTES_MAX: usize = 4096;

/// A directory or a prefix of a bucket.
///
/// Normal form (`Display`): `file:///…` percent-encoded, or `s3://bucket/prefix` with the key as
/// it is (as the cloud's own tools do); no trailing slash, no `.`, `..` or empty component, never
/// a user, password, query or fragment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OriginUri(Place);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Place {
    /// Absolute.
    Local(PathBuf),
    /// `path` is empty or clean.
    S3 { bucket: String, path: String },
}

impl OriginUri {
    /// Reads a path (made absolute by the working directory, links not resolved), a `file://` or
    /// an `s3://` URI.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for another scheme (the message names those accepted), `..`, a user
    /// or password, a signed URL, or a text that is none of these. Secrets are not repeated in it.
    pub fn parse(text: &str) -> Result<Self, OriginError> {
        if ["X-Amz-Signature", "X-Amz-Credential", "AWSAccessKeyId="].iter().any(|s| text.contains(s)) {
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
            "s3" => s3(text, host, path),
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
            Place::S3 { bucket, path } if path.is_empty() => {
                Place::S3 { bucket: bucket.clone(), path: rel.to_owned() }
            }
            Place::S3 { bucket, path } => Place::S3 { bucket: bucket.clone(), path: format!("{path}/{rel}") },
        }))
    }

    /// The directory, where it is one of this machine.
    #[must_use]
    pub fn as_local(&self) -> Option<&Path> {
        match &self.0 {
            Place::Local(path) => Some(path),
            Place::S3 { .. } => None,
        }
    }

    /// Whether `other` is this place or lies below it. By names alone: links are not resolved.
    #[must_use]
    pub fn contains(&self, other: &OriginUri) -> bool {
        match (&self.0, &other.0) {
            (Place::Local(a), Place::Local(b)) => b.starts_with(a),
            (Place::S3 { bucket: a, path: p }, Place::S3 { bucket: b, path: q }) => {
                a == b
                    && (p.is_empty()
                        || q.strip_prefix(p.as_str()).is_some_and(|r| r.is_empty() || r.starts_with('/')))
            }
            _ => false,
        }
    }

    pub(crate) fn place(&self) -> &Place {
        &self.0
    }

    /// Its length, to compare prefixes of one place with.
    pub(crate) fn length(&self) -> usize {
        match &self.0 {
            Place::Local(path) => path.as_os_str().len(),
            Place::S3 { bucket, path } => bucket.len() + path.len(),
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

fn s3(text: &str, bucket: &str, path: &str) -> Result<OriginUri, OriginError> {
    let fits = (3..=255).contains(&bucket.len())
        && bucket.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b));
    if !fits {
        return Err(OriginError::invalid(
            text,
            "s3:// is followed by the name of a bucket: 3-255 letters, digits, dots, dashes",
        ));
    }
    let path = path.trim_end_matches('/');
    if !path.is_empty() {
        check_path(path)?;
    }
    Ok(OriginUri(Place::S3 { bucket: bucket.to_owned(), path: path.to_owned() }))
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
            Place::S3 { bucket, path } if path.is_empty() => write!(f, "s3://{bucket}"),
            Place::S3 { bucket, path } => write!(f, "s3://{bucket}/{path}"),
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
mod tests {
    use super::*;

    #[test]
    fn texts_have_one_normal_form_that_reads_back() {
        for (text, normal) in [
            ("/data/sets/", "file:///data/sets"),
            ("/data//a/./b", "file:///data/a/b"),
            ("/", "file:///"),
            ("file:///data/a%20b", "file:///data/a%20b"),
            ("file://localhost/data", "file:///data"),
            ("/data/x#1/é/a%20b ?", "file:///data/x%231/%C3%A9/a%2520b%20%3F"),
            ("s3://bucket", "s3://bucket"),
            ("S3://bucket/", "s3://bucket"),
            ("s3://bucket/a b/x#1/a%20b/", "s3://bucket/a b/x#1/a%20b"),
        ] {
            let uri = OriginUri::parse(text).expect(text);
            assert_eq!(uri.to_string(), normal);
            assert_eq!(OriginUri::parse(normal), Ok(uri));
        }
        let here = std::env::current_dir().expect("working directory");
        assert_eq!(OriginUri::parse("sub").expect("relative").as_local(), Some(here.join("sub").as_path()));
    }

    #[test]
    fn what_is_no_origin_is_refused_with_a_reason() {
        for (text, why) in [
            ("", "empty"),
            ("/data/../etc", ".."),
            ("../data", ".."),
            ("file:///data/../etc", ".."),
            ("file:///data/%2E%2e/etc", ".."),
            ("file://host/data", "host"),
            ("file:///data?x=1", "%3F"),
            ("s3://", "bucket"),
            ("s3://bucket/a/../b", ".."),
            ("s3://bucket//b", "relative"),
            ("az://container/x", "s3://bucket/prefix"),
            ("gs://bucket/x", "s3://bucket/prefix"),
            ("https://host/x", "s3://bucket/prefix"),
            ("/da\0ta", "NUL"),
        ] {
            let error = OriginUri::parse(text).expect_err(text);
            assert!(matches!(&error, OriginError::Invalid { .. }), "{text}: {error:?}");
            assert!(error.to_string().contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn secrets_are_refused_and_not_repeated() {
        for text in [
            "s3://key:hunter2@bucket/x",
            "https://u:hunter2@h/x",
            "https://h/x?X-Amz-Signature=hunter2",
            "https://h/x?sv=hunter2",
        ] {
            let error = OriginUri::parse(text).expect_err(text);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn join_and_contains_go_by_components() {
        let base = OriginUri::parse("s3://bucket/a").expect("uri");
        assert_eq!(base.join("b/c").expect("join").to_string(), "s3://bucket/a/b/c");
        for bad in ["", "/x", "../x", "a//b", "a/.", "a\0"] {
            assert!(base.join(bad).is_err(), "{bad:?}");
        }
        let contains =
            |a: &str, b: &str| OriginUri::parse(a).expect(a).contains(&OriginUri::parse(b).expect(b));
        assert!(contains("s3://bucket", "s3://bucket/a"));
        assert!(contains("s3://bucket/a", "s3://bucket/a/b"));
        assert!(!contains("s3://bucket/a", "s3://bucket/ab"));
        assert!(!contains("s3://bucket/a", "s3://bucket"));
        assert!(contains("/data", "file:///data/x") && contains("/data", "/data"));
        assert!(!contains("/data", "/database"));
        assert!(!contains("/", "s3://bucket"));
    }

    #[test]
    fn dots_typed_by_a_person_are_resolved() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::create_dir(dir.path().join("a")).expect("mkdir");
        let text = format!("{}/a/..", dir.path().display());
        let real = std::fs::canonicalize(dir.path()).expect("canonicalize");
        assert_eq!(OriginUri::from_arg(&text).expect("resolved").as_local(), Some(real.as_path()));
        assert!(OriginUri::from_arg("s3://bucket/../x").is_err());
    }
}
