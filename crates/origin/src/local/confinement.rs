//! Confines an origin to files whose real path, all links followed, is allowed.

use super::real_path::{Place, real_path};
use crate::OriginError;
use std::{fmt, fs::File, os::fd::AsRawFd as _, path::Path, sync::Arc};

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

    /// Rejects a name whose real path is not allowed now, before the file system is asked about that path.
    ///
    /// # Errors
    /// [`OriginError::Denied`], whatever exists at the real path; the error of the system for a path that is
    /// allowed.
    pub fn check_name(&self, path: &Path, what: &str) -> Result<(), OriginError> {
        let Some(may) = &self.0 else { return Ok(()) };
        let place = |p: &Path| if may(p) { Place::Inside } else { Place::Outside };
        match real_path(path, place) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(leads_out(what)),
            Err(e) => Err(OriginError::io(what, &e)),
        }
    }

    /// Rejects an open file whose real path is not allowed, because a link changed after `check_name`.
    pub fn check(&self, file: &File, what: &str) -> Result<(), OriginError> {
        let Some(may) = &self.0 else { return Ok(()) };
        let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        if may(&real.map_err(|e| OriginError::io(what, &e))?) { Ok(()) } else { Err(leads_out(what)) }
    }

    /// Rejects a directory whose real path is not allowed now. Accepts one that does not exist.
    pub fn check_dir(&self, path: &Path, what: &str) -> Result<(), OriginError> {
        match self.check_name(path, what) {
            Err(OriginError::NotFound { .. }) => Ok(()),
            checked => checked,
        }
    }
}

/// Returns the error without the real path: the owner of the link must not learn what exists there.
fn leads_out(what: &str) -> OriginError {
    let why = "a symbolic link leads out of the directories that may be read (local.dirs)".to_owned();
    OriginError::Denied { what: what.to_owned(), why, is_of_origin: false }
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
        link("out/none", "in/absent");
        link("in/sub/a", "in/fine");
        let origins = Origins::new(Vec::new(), OriginLimits::default()).expect("origins");
        let open = origins.open(&OriginUri::local(&real.join("in")).expect("uri")).expect("open");
        let inside = real.join("in");
        let shut = open.clone().confined(Arc::new(move |p: &Path| p.starts_with(&inside)));
        for path in ["sub/a", "fine"] {
            assert_eq!(shut.get(path, None, None).await.expect(path).bytes, "x");
            assert_eq!(shut.head(path).await.expect(path).size, 1);
        }
        // A link to an absent file tells the same as one to a file that exists.
        for path in ["dir/secret", "file", "dir/none", "absent"] {
            let there = !matches!(path, "dir/none" | "absent");
            assert_eq!(open.get(path, None, None).await.is_ok(), there, "{path}");
            assert_eq!(open.head(path).await.is_ok(), there, "{path}");
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
