//! Finds the real path of a name and asks the file system only about places that may be read.
//!
//! `canonicalize` looks at every component first. Its answer, and the time that it takes, say what exists at
//! places that the caller may not read.

use std::{
    ffi::OsString,
    io,
    path::{Component, Path, PathBuf},
};

/// The most links that one path may follow, as in the kernel.
const LINKS_MAX: usize = 40;

/// How to treat a path whose parents are real.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// It may not be read. The file system is not asked about it.
    Outside,
    /// It may be read.
    Inside,
    /// It is a name of this real path, which may be read.
    Named(PathBuf),
}

/// Returns the real path of an absolute `path`, all links followed, or `None` if it leads outside.
///
/// `place` judges each path on the way. A place outside is taken as it is written, as if it had no links: so
/// an absent name there and an existing one get the same answer, after the same calls.
///
/// # Errors
/// The error of the system for a place inside.
pub fn real_path(path: &Path, place: impl Fn(&Path) -> Place) -> io::Result<Option<PathBuf>> {
    let mut at = PathBuf::from("/");
    let (mut pending, mut links, mut inside) = (reversed(path), 0, place(&at) == Place::Inside);
    while let Some(part) = pending.pop() {
        let Some(name) = part else {
            at.pop();
            inside = place(&at) == Place::Inside;
            continue;
        };
        at.push(name);
        match place(&at) {
            Place::Outside => {
                inside = false;
                continue;
            }
            Place::Named(real) => {
                at = real;
                inside = true;
                continue;
            }
            Place::Inside => inside = true,
        }
        if !std::fs::symlink_metadata(&at)?.is_symlink() {
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        let target = std::fs::read_link(&at)?;
        at = if target.is_absolute() {
            PathBuf::from("/")
        } else {
            at.parent().unwrap_or(Path::new("/")).into()
        };
        pending.extend(reversed(&target));
    }
    Ok(inside.then_some(at))
}

/// Returns the names of a path, the last one first. `None` stands for `..`.
fn reversed(path: &Path) -> Vec<Option<OsString>> {
    let parts = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(Some(name.to_owned())),
        Component::ParentDir => Some(None),
        _ => None,
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::RefCell, os::unix::fs::symlink};

    #[test]
    fn links_are_followed_inside_and_nothing_outside_is_asked_for() {
        let top = tempfile::tempdir().expect("tempdir");
        let top = std::fs::canonicalize(top.path()).expect("real");
        for dir in ["in/a", "in2", "out/there"] {
            std::fs::create_dir_all(top.join(dir)).expect("mkdir");
        }
        let link = |to: &str, at: &str| symlink(to, top.join(at)).expect("symlink");
        link("a", "in/rel");
        link("../in2", "in/over");
        link(&top.join("in/rel").display().to_string(), "in/abs");
        link("../out/there", "in/way-out");
        link("../out/none", "in/way-out-none");
        link("loop", "in/loop");
        link("in", "named");
        link("../in/a", "out/way-in");
        let judged = RefCell::new(Vec::new());
        let find = |rel: &str| {
            judged.borrow_mut().clear();
            real_path(&top.join(rel), |p| {
                judged.borrow_mut().push(p.to_owned());
                match p {
                    p if p == top.join("named") => Place::Named(top.join("in")),
                    p if p.starts_with(top.join("in")) || p.starts_with(top.join("in2")) => Place::Inside,
                    _ => Place::Outside,
                }
            })
        };
        let inside = |rel: &str, real: &str| {
            assert_eq!(find(rel).expect(rel), Some(top.join(real)), "{rel}");
            assert_eq!(std::fs::canonicalize(top.join(rel)).expect(rel), top.join(real), "{rel}");
        };
        for (rel, real) in [("in", "in"), ("in/rel", "in/a"), ("in/over", "in2"), ("in/abs", "in/a")] {
            inside(rel, real);
        }
        inside("named/rel/..", "in");
        inside("in/a/../../in2", "in2");
        let outside =
            ["out", "out/there", "out/none", "in/..", "in/way-out", "in/way-out-none", "out/way-in"];
        for rel in outside {
            assert_eq!(find(rel).expect(rel), None, "{rel}");
        }
        let calls = |rel: &str| {
            assert_eq!(find(rel).expect(rel), None, "{rel}");
            judged.borrow().len()
        };
        assert_eq!(calls("in/way-out"), calls("in/way-out-none"), "present and absent take the same way");
        assert_eq!(find("in/none").expect_err("absent").kind(), io::ErrorKind::NotFound);
        assert_eq!(find("in/loop").expect_err("loop").raw_os_error(), Some(libc::ELOOP));
    }
}
