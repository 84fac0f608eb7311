//! Confines an origin to files whose real path, all links followed, is allowed.

use crate::OriginError;
use std::{
    fmt,
    fs::File,
    io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Returns whether the file at a real path may be read.
pub type PathFilter = Arc<dyn Fn(&Path) -> bool + Send + Sync>;

/// Allows files by their real path. The default allows every file.
#[derive(Clone, Default)]
pub(crate) struct Confinement(Option<PathFilter>);

impl fmt::Debug for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_everywhere() { "Confinement(everywhere)" } else { "Confinement(…)" })
    }
}

impl Confinement {
    pub fn only(may: PathFilter) -> Self {
        Confinement(Some(may))
    }

    pub fn is_everywhere(&self) -> bool {
        self.0.is_none()
    }

    /// Rejects an open file whose real path is not allowed.
    pub fn check(&self, file: &File, what: &str) -> Result<(), OriginError> {
        let link = || -> PathBuf { format!("/proc/self/fd/{}", file.as_raw_fd()).into() };
        self.check_real_path(what, || std::fs::read_link(link()))
    }

    /// Rejects a name whose real path is not allowed now. Accepts a name that does not exist.
    pub fn check_path(&self, path: &Path, what: &str) -> Result<(), OriginError> {
        match std::fs::canonicalize(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            real => self.check_real_path(what, || real),
        }
    }

    fn check_real_path(
        &self,
        what: &str,
        real: impl FnOnce() -> io::Result<PathBuf>,
    ) -> Result<(), OriginError> {
        let Some(may) = &self.0 else { return Ok(()) };
        let real = real().map_err(|e| OriginError::io(what, &e))?;
        if may(&real) {
            return Ok(());
        }
        // Without the real path: the owner of the link must not learn what exists there.
        let why = "a symbolic link leads out of the directories that may be read (local.dirs)".to_owned();
        Err(OriginError::Denied { what: what.to_owned(), why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OriginLimits, OriginUri, Origins};
    use futures::TryStreamExt as _;

    #[tokio::test]
    async fn no_link_leads_out_of_a_confined_place_by_any_call() {
        let top = tempfile::tempdir().expect("tempdir");
        let real = std::fs::canonicalize(top.path()).expect("real");
        for d in ["in/sub", "out"] {
            std::fs::create_dir_all(real.join(d)).expect("mkdir");
        }
        for f in ["in/sub/a", "out/secret"] {
            std::fs::write(real.join(f), "x").expect("write");
        }
        let link =
            |to: &str, at: &str| std::os::unix::fs::symlink(real.join(to), real.join(at)).expect("symlink");
        link("out", "in/dir");
        link("out/secret", "in/file");
        link("in/sub/a", "in/fine");
        let origins = Origins::new(Vec::new(), OriginLimits::default()).expect("origins");
        let open = origins.open(&OriginUri::local(&real.join("in")).expect("uri")).expect("open");
        let inside = real.join("in");
        let shut = open.clone().confined(Arc::new(move |p: &Path| p.starts_with(&inside)));
        for path in ["sub/a", "fine"] {
            assert_eq!(shut.get(path, None, None).await.expect(path).bytes, "x");
            assert_eq!(shut.head(path).await.expect(path).size, 1);
        }
        for path in ["dir/secret", "file"] {
            assert!(open.get(path, None, None).await.is_ok() && open.head(path).await.is_ok());
            let told = [shut.get(path, None, None).await.map(|_| ()), shut.head(path).await.map(|_| ())];
            for e in told {
                let e = e.expect_err(path);
                assert!(matches!(e, OriginError::Denied { .. }) && !e.to_string().contains("/out"), "{e}");
            }
        }
        let listed = async |prefix: &str| shut.list(prefix).map_ok(|m| m.path).try_collect::<Vec<_>>().await;
        assert_eq!(listed("sub").await.expect("inside"), ["sub/a"]);
        assert!(matches!(listed("dir").await, Err(OriginError::Denied { .. })));
        assert_eq!(listed("none").await.expect("nothing there"), Vec::<String>::new());
    }
}
