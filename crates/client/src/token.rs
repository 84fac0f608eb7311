//! The bearer token: where it comes from, and how a rotated one takes effect.
//!
//! 1. No token is logged or shown.
//! 2. The token file is read again only after a 401, and a call is repeated only with another token.

use crate::ClientError;
use fletch_core::Hash;
use http::HeaderValue;
use parking_lot::RwLock;
use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// The longest token, in bytes. A server reads at most 32 KiB of headers.
const TOKEN_BYTES_MAX: u64 = 8 << 10;

/// Where a bearer token comes from.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// The token itself.
    Text(String),
    /// A file with the token. It may be replaced while the client lives.
    File(PathBuf),
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenSource::Text(_) => f.write_str("Text(***)"),
            TokenSource::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

impl TokenSource {
    /// Returns the source for a token or a token file, or `None` for neither.
    ///
    /// # Errors
    /// [`ClientError::Config`] if both are given.
    pub fn of(text: Option<String>, file: Option<PathBuf>) -> Result<Option<Self>, ClientError> {
        match (text, file) {
            (Some(_), Some(_)) => Err(ClientError::Config(
                "both a token and a token file are set (flag, FLETCH_TOKEN, FLETCH_TOKEN_FILE); set one"
                    .into(),
            )),
            (text, file) => Ok(text.map(TokenSource::Text).or_else(|| file.map(TokenSource::File))),
        }
    }

    /// Returns a name for the principal of the token: a hash of the token and of `purpose`.
    ///
    /// The hash does not reveal a token that cannot be guessed. Names for different purposes differ.
    ///
    /// # Errors
    /// [`ClientError::Config`] if the token cannot be read.
    pub fn name_of(source: Option<&Self>, purpose: &str) -> Result<Hash, ClientError> {
        Ok(Bearer::new(source)?.name(purpose))
    }
}

/// The `Authorization` header in use.
pub(crate) struct Bearer {
    file: Option<PathBuf>,
    header: RwLock<Option<HeaderValue>>,
}

impl Bearer {
    /// Reads the token.
    ///
    /// # Errors
    /// [`ClientError::Config`] if the token cannot be read or does not fit in a header.
    pub fn new(source: Option<&TokenSource>) -> Result<Self, ClientError> {
        let (header, file) = match source {
            None => (None, None),
            Some(TokenSource::Text(token)) => (Some(header(token, "the token")?), None),
            Some(TokenSource::File(path)) => (Some(read(path)?), Some(path.clone())),
        };
        Ok(Bearer { file, header: RwLock::new(header) })
    }

    /// Returns the header to send.
    pub fn header(&self) -> Option<HeaderValue> {
        self.header.read().clone()
    }

    /// Returns the name of the principal, as [`TokenSource::name_of`], for the token in use.
    pub fn name(&self, purpose: &str) -> Hash {
        let token = self.header();
        let token = token.as_ref().map_or(&b""[..], HeaderValue::as_bytes);
        // Neither a header nor a purpose contains a zero byte.
        Hash::of(&[b"fletch principal 1\0", purpose.as_bytes(), b"\0", token].concat())
    }

    /// Returns whether another token than `refused` is in use now. Blocking: reads the token file.
    ///
    /// Another caller may have read the new token already, or the file was rotated since.
    pub fn renewed(&self, refused: Option<&HeaderValue>) -> bool {
        if self.header().as_ref() != refused {
            return true;
        }
        let Some(path) = &self.file else { return false };
        match read(path) {
            Ok(new) if Some(&new) != refused => {
                *self.header.write() = Some(new);
                tracing::info!(file = %path.display(), "read a new token from the token file");
                true
            }
            Ok(_) => false,
            Err(error) => {
                tracing::warn!(%error, "the server rejected the token, and the token file cannot be read");
                false
            }
        }
    }
}

fn read(path: &Path) -> Result<HeaderValue, ClientError> {
    let text = || -> io::Result<String> {
        if std::fs::metadata(path)?.len() > TOKEN_BYTES_MAX {
            return Err(io::Error::other("the file is longer than 8 KiB, the longest token"));
        }
        std::fs::read_to_string(path)
    };
    let shown = path.display();
    let text = text().map_err(|e| ClientError::Config(format!("token file {shown}: {e}")))?;
    header(text.trim(), &format!("the token in {shown}"))
}

fn header(token: &str, what: &str) -> Result<HeaderValue, ClientError> {
    if token.is_empty() {
        return Err(ClientError::Config(format!("{what} is empty")));
    }
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| {
        ClientError::Config(format!("{what} contains bytes that an HTTP header cannot carry"))
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotated_file_renews_and_nothing_else_does() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("token");
        std::fs::write(&path, "one\n").expect("write");
        let bearer = Bearer::new(Some(&TokenSource::File(path.clone()))).expect("read");
        let one = bearer.header();
        assert_eq!(one.as_ref().map(HeaderValue::as_bytes), Some(&b"Bearer one"[..]));
        assert!(!bearer.renewed(one.as_ref()), "the same token is not a renewal");
        std::fs::write(&path, "").expect("write");
        assert!(!bearer.renewed(one.as_ref()), "a file that is being written");
        let name = bearer.name("x");
        std::fs::write(&path, "two").expect("write");
        assert_eq!(bearer.name("x"), name, "the name is that of the token in use");
        assert!(bearer.renewed(one.as_ref()));
        let now = TokenSource::name_of(Some(&TokenSource::File(path.clone())), "x").expect("readable");
        assert!(bearer.name("x") == now && now != name);
        let two = bearer.header();
        assert!(two != one && bearer.renewed(one.as_ref()), "another caller has renewed the token");
        assert!(!bearer.renewed(two.as_ref()));
        let fixed = Bearer::new(Some(&TokenSource::Text("x".into()))).expect("fixed");
        assert!(!fixed.renewed(fixed.header().as_ref()));
        for bad in ["", "a\nb"] {
            assert!(Bearer::new(Some(&TokenSource::Text(bad.into()))).is_err(), "{bad:?}");
        }
        assert!(Bearer::new(Some(&TokenSource::File(dir.path().join("absent")))).is_err());
    }
}
