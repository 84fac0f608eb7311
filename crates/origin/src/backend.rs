//! Names what serves an origin, so that origins that fail together share their calls.

use crate::OriginConfig;
use crate::uri::Scheme;
use fletch_host::mounts;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// What serves an origin: the endpoint of a store, a bucket of a cloud, a plain server, or a file system.
///
/// When it hangs, every origin that it serves hangs. A bucket of a cloud is a backend of its own, because a
/// cloud slows down each bucket by itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend(Arc<str>);

impl Backend {
    pub(crate) fn of_store(config: &OriginConfig, scheme: Scheme, host: &str) -> Self {
        match &config.endpoint {
            Some(endpoint) => Backend(endpoint.trim_end_matches('/').to_ascii_lowercase().into()),
            None => {
                let account = config.account.as_deref().filter(|_| scheme == Scheme::Azure);
                let account = account.map(|account| format!("{account}/")).unwrap_or_default();
                Backend(format!("{}://{account}{host}", scheme.as_str()).into())
            }
        }
    }

    /// Returns the name of an `[[origin]]` that has permits of its own.
    pub(crate) fn of_table(prefix: &str) -> Self {
        Backend(format!("[[origin]] {prefix}").into())
    }

    /// Returns the backend of a directory: its file system, and whether that is one of this machine's disks
    /// or memory. Asks the mount table, never the file system.
    pub(crate) fn of_dir(dir: &Path) -> (Self, bool) {
        Self::in_table(&std::fs::read("/proc/self/mountinfo").unwrap_or_default(), dir)
    }

    fn in_table(table: &[u8], dir: &Path) -> (Self, bool) {
        match mounts::holding(table, dir) {
            Some(mount) => {
                let is_near = !mounts::is_network(&mount.fs_type);
                (Backend(format!("file system {}", mount.device).into()), is_near)
            }
            None => (Backend(dir.display().to_string().into()), false),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_together_is_one_backend() {
        let at = |endpoint: Option<&str>, bucket: &str| {
            let endpoint = endpoint.map(str::to_owned);
            Backend::of_store(&OriginConfig { endpoint, ..OriginConfig::default() }, Scheme::S3, bucket)
        };
        assert_eq!(at(Some("http://s3.local:9000"), "a"), at(Some("http://S3.local:9000/"), "b"));
        assert_ne!(at(Some("http://s3.local:9000"), "a"), at(Some("http://s3.local:9001"), "a"));
        assert_ne!(at(None, "a"), at(None, "b"), "a cloud slows down each bucket by itself");
        let table = b"1 0 0:1 / / rw - overlay o rw\n2 1 0:52 / /nfs/a rw - nfs4 h:/a rw\n\
            3 1 0:52 /x /mnt/bound rw - nfs4 h:/a rw\n";
        let dir = |dir: &str| Backend::in_table(table, Path::new(dir));
        assert_eq!(dir("/nfs/a/one"), dir("/nfs/a/two"));
        assert!(!dir("/nfs/a/one").1 && dir("/elsewhere").1 && !Backend::in_table(b"", Path::new("/a")).1);
        assert_eq!(dir("/nfs/a/one"), dir("/mnt/bound/x"));
        assert_ne!(dir("/nfs/a/one"), dir("/nfs/b"));
        assert_ne!(Backend::in_table(b"", Path::new("/a")), Backend::in_table(b"", Path::new("/b")));
    }
}
