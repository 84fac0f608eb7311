//! The token with which this server asks the others.

use super::ClusterError;
use parking_lot::Mutex;
use reqwest::header::HeaderValue;
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::task::spawn_blocking;
use url::{Host, Url};

/// How soon the file is read again after a member refused the token.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The token of a file, and when it was read.
#[derive(Debug)]
struct Read {
    value: HeaderValue,
    at: Instant,
}

/// The token, if a file has one.
#[derive(Debug)]
pub(super) struct Token {
    file: Option<PathBuf>,
    last: Mutex<Option<Read>>,
}

impl Token {
    /// Reads the token. Blocking.
    ///
    /// # Errors
    /// [`ClusterError::File`].
    pub fn new(file: Option<PathBuf>) -> Result<Self, ClusterError> {
        let last = file.as_deref().map(read).transpose()?;
        Ok(Token { file, last: Mutex::new(last) })
    }

    /// Returns the value of the header.
    pub fn header(&self) -> Option<HeaderValue> {
        self.last.lock().as_ref().map(|read| read.value.clone())
    }

    /// Makes the token look as if it was read long ago.
    #[cfg(test)]
    pub fn grow_old(&self) {
        self.last.lock().as_mut().expect("a token").at -= 2 * READ_AGAIN_AFTER;
    }

    /// Reads the file again, if that was not done a moment ago. Returns whether the token changed.
    pub async fn read_again(&self) -> bool {
        let Some(path) = self.file.clone() else { return false };
        if self.last.lock().as_ref().is_some_and(|last| last.at.elapsed() < READ_AGAIN_AFTER) {
            return false;
        }
        match spawn_blocking(move || read(&path)).await {
            Ok(Ok(new)) => {
                let mut last = self.last.lock();
                let changed = last.as_ref().is_none_or(|old| old.value != new.value);
                *last = Some(new);
                changed
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "the token for peers stays as it is");
                false
            }
            Err(_) => false,
        }
    }
}

fn read(path: &Path) -> Result<Read, ClusterError> {
    let file = |error| ClusterError::File { path: path.to_owned(), error };
    let text = fs::read_to_string(path).map_err(file)?;
    let mut value = HeaderValue::from_str(&format!("Bearer {}", text.trim()))
        .map_err(|e| file(io::Error::new(io::ErrorKind::InvalidData, e)))?;
    value.set_sensitive(true);
    Ok(Read { value, at: Instant::now() })
}

/// Whether a token may go to a URL: over TLS, or to this machine.
#[must_use]
pub fn is_safe(url: &str) -> bool {
    let Ok(url) = Url::parse(url) else { return false };
    let is_own_machine = match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    };
    url.scheme() == "https" || is_own_machine
}
