//! Finds credentials, reads them, and notices when their file changes.
//!
//! The values never leave this crate, and no `Debug` output shows one.

use crate::aws_profile::{self, AwsChain, Login, Variables, ini};
use crate::uri::Scheme;
use crate::{ConfiguredBy, Credentials, OriginError};
use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The longest credentials file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The source of credentials, as it was when a client was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// Environment variables and the machine's identity. `object_store` refreshes them by itself.
    ///
    /// `looked_at` lists the places that have none, if only the machine's identity is left.
    Env { looked_at: Option<String> },
    /// A login that a profile of AWS's files describes.
    Login(Login),
    /// A profile of AWS's files that cannot be used, with the reason.
    Unusable(OriginError),
    /// A file and, in the format of `~/.aws/credentials`, the profile in it.
    File { path: PathBuf, profile: String },
    /// Credentials that a user handed over. They are in memory only.
    Given(Arc<Profile>),
    /// No credentials: requests are not signed.
    Anonymous,
}

/// The state of a file when it was read. A rotation that keeps size and time changes the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl FileStamp {
    pub fn of(path: &Path) -> Option<FileStamp> {
        let meta = std::fs::metadata(path).ok()?;
        Some(FileStamp {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
        })
    }
}

/// Returns the source that the configuration selects now.
pub(crate) fn source(configured: Option<&Credentials>, scheme: Scheme, by: ConfiguredBy) -> Source {
    source_by((configured, by), scheme, &|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
}

fn source_by(
    (configured, by): (Option<&Credentials>, ConfiguredBy),
    scheme: Scheme,
    var: Variables<'_>,
) -> Source {
    let file = |path: PathBuf| Source::File { path, profile: "default".to_owned() };
    let env = || Source::Env { looked_at: looked_at(scheme, var) };
    match configured {
        Some(Credentials::Anonymous) => Source::Anonymous,
        Some(Credentials::File(path)) => file(path.clone()),
        None | Some(Credentials::Env) if scheme.is_plain() => Source::Anonymous,
        None | Some(Credentials::Env) => env(),
        Some(Credentials::Chain) => match scheme {
            Scheme::S3 => match aws_profile::chain(var) {
                Ok(AwsChain::Variables) => env(),
                Ok(AwsChain::File { path, profile }) => Source::File { path, profile },
                // A user who hands something over must not make this process run a program.
                Ok(AwsChain::Login(_)) if by == ConfiguredBy::Given => {
                    let why = "credentials that need a login are handed over as keys";
                    Source::Unusable(OriginError::invalid("options.credentials", why))
                }
                Ok(AwsChain::Login(login)) => Source::Login(login),
                Ok(AwsChain::Machine { looked_at: places }) => {
                    let of_machine = looked_at(scheme, var).is_some();
                    let places = of_machine.then(|| format!("no AWS credentials found (looked at {places}"));
                    Source::Env { looked_at: places }
                }
                Err(error) => Source::Unusable(error),
            },
            Scheme::Gcs => {
                var("GOOGLE_APPLICATION_CREDENTIALS").map_or_else(env, |path| file(PathBuf::from(path)))
            }
            Scheme::Http | Scheme::Https => Source::Anonymous,
            Scheme::Azure => env(),
        },
    }
}

/// Returns the beginning of the error of a machine without any credentials. `None` if a variable names some.
fn looked_at(scheme: Scheme, var: Variables<'_>) -> Option<String> {
    let (cloud, names): (_, &[&str]) = match scheme {
        Scheme::S3 => (
            "AWS",
            &[
                "AWS_ACCESS_KEY_ID",
                "AWS_WEB_IDENTITY_TOKEN_FILE",
                "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            ],
        ),
        Scheme::Azure => (
            "Azure",
            &[
                "AZURE_STORAGE_ACCOUNT_KEY",
                "AZURE_STORAGE_KEY",
                "AZURE_STORAGE_SAS_TOKEN",
                "AZURE_CLIENT_ID",
                "AZURE_FEDERATED_TOKEN_FILE",
            ],
        ),
        Scheme::Gcs => (
            "Google Cloud",
            &[
                "GOOGLE_APPLICATION_CREDENTIALS",
                "GOOGLE_SERVICE_ACCOUNT",
                "GOOGLE_SERVICE_ACCOUNT_PATH",
                "GOOGLE_SERVICE_ACCOUNT_KEY",
            ],
        ),
        Scheme::Http | Scheme::Https => return None,
    };
    if names.iter().any(|name| var(name).is_some()) {
        return None;
    }
    Some(format!("no {cloud} credentials found (looked at {}", names.join(", ")))
}

/// The `key = value` lines of one profile. Keys are in lower case.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Profile {
    values: BTreeMap<String, String>,
}

impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Profile(redacted)")
    }
}

impl Profile {
    /// Returns the profile with these values. Its keys must be in lower case.
    pub fn of(values: BTreeMap<String, String>) -> Profile {
        Profile { values }
    }

    /// Reads the profile `[name]` of a file. The lines before any profile belong to `default`.
    pub fn load(path: &Path, name: &str) -> Result<Profile, OriginError> {
        let names = [name, &format!("profile {name}")];
        Ok(Profile { values: ini::section(&text(path)?, &names).unwrap_or_default() })
    }

    /// Returns the value of the first of these keys that the profile has.
    pub fn value(&self, keys: &[&str]) -> Option<&str> {
        keys.iter().find_map(|key| self.values.get(*key)).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

/// Returns the keys and values of one profile of a credentials file, for whoever hands them over.
///
/// # Errors
/// The file cannot be read.
pub fn keys_of_file(path: &Path, profile: &str) -> Result<BTreeMap<String, String>, OriginError> {
    Ok(Profile::load(path, profile)?.values)
}

/// Reads a credentials file. Errors name the file and never its content.
pub(crate) fn text(path: &Path) -> Result<String, OriginError> {
    let cannot =
        |why: String| OriginError::invalid(path.display(), format!("the credentials cannot be read: {why}"));
    let (file, meta) = crate::regular_file::open_regular(path).map_err(|e| cannot(e.to_string()))?;
    if meta.len() > FILE_BYTES_MAX {
        return Err(cannot(format!(
            "the file has {} bytes, at most {FILE_BYTES_MAX} are allowed",
            meta.len()
        )));
    }
    std::io::read_to_string(file).map_err(|e| cannot(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_profile_is_read_and_never_shown() {
        let text = "# mine\n[other]\nk = no\nid = 7\n[default]\nK = AKIA1\n s=hunter2=\nempty =\n";
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("c");
        std::fs::write(&path, text).expect("write");
        let profile = Profile::load(&path, "default").expect("a profile");
        assert_eq!((profile.value(&["x", "k"]), profile.value(&["s"])), (Some("AKIA1"), Some("hunter2=")));
        assert_eq!((profile.value(&["id"]), profile.value(&["empty"])), (None, None));
        assert!(!format!("{profile:?}").contains("hunter2"));
        let other = Profile::load(&path, "other").expect("a profile");
        assert_eq!(other.value(&["k"]), Some("no"));
        assert!(Profile::load(&dir.path().join("none"), "default").is_err());
        assert!(Profile::load(dir.path(), "default").is_err());
    }

    #[test]
    fn a_chain_takes_variables_then_the_shared_file_then_the_machine() {
        let dir = tempfile::tempdir().expect("tempdir");
        let shared = dir.path().join("credentials");
        let chain = Some(&Credentials::Chain);
        std::fs::write(&shared, "aws_access_key_id = a\naws_secret_access_key = b\n").expect("write");
        let by = ConfiguredBy::Settings;
        let at = |scheme, set: &[&str]| {
            let var = |name: &str| set.contains(&name).then(|| shared.display().to_string());
            source_by((chain, by), scheme, &var)
        };
        let file = Source::File { path: shared.clone(), profile: "default".to_owned() };
        assert_eq!(at(Scheme::S3, &["AWS_ACCESS_KEY_ID"]), Source::Env { looked_at: None });
        assert_eq!(at(Scheme::S3, &["AWS_SHARED_CREDENTIALS_FILE"]), file);
        let Source::Env { looked_at: Some(looked_at) } = at(Scheme::S3, &[]) else { panic!("the machine") };
        for place in ["AWS_ACCESS_KEY_ID", "~/.aws/credentials profile default", "~/.aws/config"] {
            assert!(
                looked_at.starts_with("no AWS credentials found") && looked_at.contains(place),
                "{looked_at}"
            );
        }
        assert_eq!(at(Scheme::Gcs, &["GOOGLE_APPLICATION_CREDENTIALS"]), file);
        assert_eq!(source_by((None, by), Scheme::Https, &|_| None), Source::Anonymous);
    }

    #[test]
    fn a_stamp_notices_a_rewrite_and_a_swap() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, "1").expect("write");
        let before = FileStamp::of(&a);
        assert!(before.is_some() && before == FileStamp::of(&a));
        std::fs::write(&b, "2").expect("write");
        std::fs::rename(&b, &a).expect("rename");
        assert_ne!(FileStamp::of(&a), before);
        assert_eq!(FileStamp::of(&b), None);
    }
}
