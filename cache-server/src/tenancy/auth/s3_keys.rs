//! Credentials of S3 clients, derived from tokens.
//!
//! An S3 client signs its requests with a secret that the server must know, too, and the tokens file has
//! hashes only. So the server has a key `K` of its own, and derives the secret of a public id:
//!
//! ```text
//! id     = FL1.<first 16 hex digits of the token's hash>.<end, in seconds since 1970>
//! secret = HMAC-SHA256(K, id), as 64 hex digits
//! ```
//! Nothing is stored. Credentials end at the time in their id, when their token is removed, and when `K`
//! changes. All servers of a cluster have the same `K`.
//!
//! Invariants:
//! 1. The secret of every id can be derived, that of a token which never existed, too. So a wrong signature
//!    gets the same answer whether the token exists or not.
//! 2. A key file with a fault changes nothing: the previous key stays in force. The fault is logged once for
//!    each state of the file.

use aws_lc_rs::hmac;
use fletch_host::files::FileStamp;
use parking_lot::{Mutex, RwLock};
use std::{
    fmt,
    io::{self, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    str::FromStr,
};

/// What an id begins with: the name of this form of credentials.
const FORM: &str = "FL1";
/// The bytes of the key.
const KEY_BYTES: usize = 32;
/// The rights that nobody but the owner may have. A group may read: Kubernetes mounts Secrets so.
const FOREIGN_RIGHTS: u32 = 0o037;

/// The public id of credentials, which S3 calls the access key id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessId {
    /// The first eight bytes of the hash of the token.
    pub prefix: u64,
    /// When the credentials end, in seconds since 1970.
    pub ends_s: u64,
}

impl fmt::Display for AccessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FORM}.{:016x}.{}", self.prefix, self.ends_s)
    }
}

impl FromStr for AccessId {
    type Err = ();

    /// Reads an id. Each id has one form only.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (form, rest) = text.split_once('.').ok_or(())?;
        let (prefix, ends) = rest.split_once('.').ok_or(())?;
        let prefix = u64::from_str_radix(prefix, 16).map_err(|_| ())?;
        let id = AccessId { prefix, ends_s: ends.parse().map_err(|_| ())? };
        if form == FORM && id.to_string() == text { Ok(id) } else { Err(()) }
    }
}

/// The secret of credentials. `Debug` does not show it.
pub struct S3Secret(String);

impl S3Secret {
    /// Returns the secret, as the client gets it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Makes the secret of a signature test.
    #[must_use]
    pub fn of_text(text: &str) -> Self {
        S3Secret(text.to_owned())
    }
}

impl fmt::Debug for S3Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("S3Secret(…)")
    }
}

/// Why a key file is not used.
#[derive(Debug, thiserror::Error)]
pub enum S3KeyError {
    /// It cannot be read.
    #[error("s3.key_file: cannot read {}: {error}; check the path and the permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// It has another length.
    #[error(
        "s3.key_file: {} does not have exactly {KEY_BYTES} bytes; make one with `head -c 32 /dev/urandom`",
        path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
    },
    /// Other users may read or change it.
    #[error(
        "s3.key_file: {} has mode {mode:04o}: other users may read or change it; run `chmod 0600` on it",
        path.display()
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// Derives the secrets of S3 clients.
pub struct S3Keys {
    path: PathBuf,
    key: RwLock<hmac::Key>,
    /// The state of the file at the last check. `None` if the file could not be read.
    last_stamp: Mutex<Option<FileStamp>>,
}

impl fmt::Debug for S3Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Keys").field("path", &self.path).finish_non_exhaustive()
    }
}

impl S3Keys {
    /// Reads the key file. Blocking.
    ///
    /// # Errors
    /// [`S3KeyError`].
    pub fn open(path: &Path) -> Result<Self, S3KeyError> {
        // Stamped before it is read, so that the next check notices a change in between.
        let last_stamp = Mutex::new(FileStamp::at(path).ok());
        Ok(S3Keys { path: path.to_owned(), key: RwLock::new(load(path)?), last_stamp })
    }

    /// Returns the secret of an id.
    #[must_use]
    pub fn secret(&self, id: &str) -> S3Secret {
        S3Secret(hex::encode(hmac::sign(&self.key.read(), id.as_bytes()).as_ref()))
    }

    /// Reloads the key file if it changed. Blocking.
    pub fn reload(&self) {
        let Some(mut seen) = self.last_stamp.try_lock() else { return };
        let stamp = FileStamp::at(&self.path).ok();
        if stamp == *seen {
            return;
        }
        *seen = stamp;
        match load(&self.path) {
            Ok(key) => {
                *self.key.write() = key;
                tracing::info!(
                    file = %self.path.display(),
                    "the changed key of the S3 door is in force: credentials of the previous key have ended"
                );
            }
            Err(error) => {
                tracing::error!(
                    %error,
                    "the changed key file of the S3 door has a fault; the previous key stays in force"
                );
            }
        }
    }
}

fn load(path: &Path) -> Result<hmac::Key, S3KeyError> {
    let failed = |error| S3KeyError::Read { path: path.to_owned(), error };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o7777;
    if mode & FOREIGN_RIGHTS != 0 {
        return Err(S3KeyError::Mode { path: path.to_owned(), mode });
    }
    let mut bytes = Vec::with_capacity(KEY_BYTES + 1);
    file.take(KEY_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() != KEY_BYTES {
        return Err(S3KeyError::Length { path: path.to_owned() });
    }
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, bytes: &[u8], mode: u32) {
        let part = path.with_extension("part");
        std::fs::write(&part, bytes).expect("write");
        std::fs::set_permissions(&part, std::fs::Permissions::from_mode(mode)).expect("mode");
        std::fs::rename(&part, path).expect("rename");
    }

    #[test]
    fn an_id_has_one_form() {
        let id = AccessId { prefix: 0xab, ends_s: 1_800_000_000 };
        assert_eq!(id.to_string(), "FL1.00000000000000ab.1800000000");
        assert_eq!(id.to_string().parse(), Ok(id));
        let wrong = [
            "",
            "FL1",
            "FL1.00000000000000ab",
            "FL2.00000000000000ab.1800000000",
            "FL1.00000000000000AB.1800000000",
            "FL1.ab.1800000000",
            "FL1.00000000000000ab.01800000000",
            "FL1.00000000000000ab.+1800000000",
            "FL1.00000000000000ab.1800000000.",
            "AKIDEXAMPLE",
        ];
        for text in wrong {
            assert_eq!(text.parse::<AccessId>(), Err(()), "{text}");
        }
    }

    #[test]
    fn a_new_key_ends_what_the_old_one_gave() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("s3.key");
        put(&path, &[7; 32], 0o600);
        let keys = S3Keys::open(&path).expect("a key");
        let first = keys.secret("FL1.x");
        assert_eq!(first.as_str().len(), 64);
        assert_ne!(first.as_str(), keys.secret("FL1.y").as_str());
        put(&path, &[8; 32], 0o640);
        keys.reload();
        let second = keys.secret("FL1.x");
        assert_ne!(first.as_str(), second.as_str());
        for (bytes, mode) in [(&[9; 31][..], 0o600), (&[9; 33][..], 0o600), (&[9; 32][..], 0o604)] {
            put(&path, bytes, mode);
            keys.reload();
            assert_eq!(second.as_str(), keys.secret("FL1.x").as_str(), "the previous key stays in force");
            let told = S3Keys::open(&path).expect_err("a fault").to_string();
            assert!(told.contains("32") || told.contains("0604"), "{told}");
        }
        assert!(!format!("{keys:?} {second:?}").contains(second.as_str()), "nothing shows a secret");
    }
}
