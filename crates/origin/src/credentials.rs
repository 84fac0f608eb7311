//! Finds credentials, reads them, and notices when their file changes.
//!
//! The values never leave this crate, and no `Debug` output shows one.

use crate::uri::Scheme;
use crate::{Credentials, OriginError};
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
    Env,
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
pub(crate) fn source(configured: Option<&Credentials>, scheme: Scheme) -> Source {
    source_by(configured, scheme, |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from))
}

fn source_by(
    configured: Option<&Credentials>,
    scheme: Scheme,
    var: impl Fn(&str) -> Option<PathBuf>,
) -> Source {
    let file = |path: PathBuf, profile: Option<PathBuf>| Source::File {
        path,
        profile: profile.and_then(|p| p.into_os_string().into_string().ok()).unwrap_or("default".to_owned()),
    };
    match configured {
        Some(Credentials::Anonymous) => Source::Anonymous,
        Some(Credentials::File(path)) => file(path.clone(), None),
        None | Some(Credentials::Env) if scheme.is_plain() => Source::Anonymous,
        None | Some(Credentials::Env) => Source::Env,
        Some(Credentials::Chain) => match scheme {
            Scheme::S3 if var("AWS_ACCESS_KEY_ID").is_none() => {
                let shared = var("AWS_SHARED_CREDENTIALS_FILE")
                    .or_else(|| Some(var("HOME")?.join(".aws/credentials")))
                    .filter(|path| path.is_file());
                shared.map_or(Source::Env, |path| file(path, var("AWS_PROFILE")))
            }
            Scheme::Gcs => var("GOOGLE_APPLICATION_CREDENTIALS").map_or(Source::Env, |path| file(path, None)),
            Scheme::Http | Scheme::Https => Source::Anonymous,
            Scheme::S3 | Scheme::Azure => Source::Env,
        },
    }
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
        Ok(Profile { values: parse(&text(path)?, name) })
    }

    /// Returns the value of the first of these keys that the profile has.
    pub fn value(&self, keys: &[&str]) -> Option<&str> {
        keys.iter().find_map(|key| self.values.get(*key)).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
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

fn parse(text: &str, name: &str) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    let mut ours = name == "default";
    for line in text.lines().map(str::trim) {
        if let Some(profile) = line.strip_prefix('[') {
            ours = profile.trim_end_matches(']').trim() == name;
        } else if let (true, Some((key, value))) =
            (ours && !line.starts_with(['#', ';']), line.split_once('='))
            && !value.trim().is_empty()
        {
            values.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    values
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
        std::fs::write(&shared, "").expect("write");
        let chain = Some(&Credentials::Chain);
        let vars = |set: &'static [&'static str]| {
            let shared = shared.clone();
            move |name: &str| set.contains(&name).then(|| shared.clone())
        };
        let file = Source::File { path: shared.clone(), profile: "default".to_owned() };
        assert_eq!(source_by(chain, Scheme::S3, vars(&["AWS_ACCESS_KEY_ID"])), Source::Env);
        assert_eq!(source_by(chain, Scheme::S3, vars(&["AWS_SHARED_CREDENTIALS_FILE"])), file);
        assert_eq!(source_by(chain, Scheme::S3, vars(&[])), Source::Env);
        assert_eq!(source_by(chain, Scheme::Gcs, vars(&["GOOGLE_APPLICATION_CREDENTIALS"])), file);
        assert_eq!(source_by(None, Scheme::Https, vars(&[])), Source::Anonymous);
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
