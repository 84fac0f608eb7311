//! Walks a local tree in the order of a version's entries.
//!
//! Invariants:
//! 1. files, links and faults come in the byte order of their entry paths (directories count
//!    as `name/`), so that the walk can be merged with a parent's rows;
//! 2. memory is bounded by `names_bytes_max` and the depth of the tree, not by its size;
//! 3. no file is opened here, and nothing is looked at twice unless the directory did not say
//!    what it is, or links are followed.

use super::names::{NameKind, Names, NamesBuilder};
use super::spill::Spill;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Memory for names, in bytes.
pub const NAMES_BYTES_MAX: usize = 48 << 20;
/// Directories in memory smaller than this are not worth moving out.
const EVICT_BYTES_MIN: usize = 64 << 10;
/// A directory being read may always use this much.
const BUDGET_BYTES_MIN: usize = 1 << 20;

/// What becomes of symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Symlinks {
    /// Keep them as links, verbatim (the default).
    Keep,
    /// Index what they point to, under the link's path.
    Follow,
    /// Leave them out.
    Skip,
    /// Refuse them.
    Error,
}

impl Symlinks {
    /// The word on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Symlinks::Keep => "keep",
            Symlinks::Follow => "follow",
            Symlinks::Skip => "skip",
            Symlinks::Error => "error",
        }
    }
}

/// One thing the walk came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A regular file; `follow` when it is reached through a link.
    File {
        /// Its entry path.
        path: String,
        /// Whether the last component is a link.
        follow: bool,
    },
    /// A link to be kept.
    Link {
        /// Its entry path.
        path: String,
    },
    /// Everything below this directory has come.
    DirEnd {
        /// Its path, without a closing slash.
        path: String,
    },
    /// Something that cannot be an entry.
    Fault {
        /// Where, printable.
        path: String,
        /// Why, and what to do.
        why: String,
    },
}

/// What to walk.
#[derive(Debug, Clone)]
pub struct WalkOptions {
    /// The top of the tree.
    pub base: PathBuf,
    /// What becomes of links.
    pub symlinks: Symlinks,
    /// Relative paths of directories to leave out, without closing slash.
    pub exclude: BTreeSet<String>,
    /// Memory for names, in bytes.
    pub names_bytes_max: usize,
}

#[derive(Debug)]
struct Frame {
    names: Names,
    /// Device and inode, known only when links are followed.
    id: Option<(u64, u64)>,
}

/// The walk.
#[derive(Debug)]
pub struct Walk {
    options: WalkOptions,
    spill: Spill,
    stack: Vec<Frame>,
    /// Path of the top frame's directory, without closing slash.
    rel: String,
    name: Vec<u8>,
}

/// Why a name cannot be an entry.
fn describe(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(libc::ENAMETOOLONG) => "the path is longer than the system can open; shorten it".into(),
        Some(libc::EACCES | libc::EPERM) => format!("{e}; grant read access or run as a user who has it"),
        Some(libc::ENOENT) => "it vanished while the tree was read; run again".into(),
        _ => e.to_string(),
    }
}

impl Walk {
    /// Begins at the top.
    ///
    /// # Errors
    /// When the top cannot be read or no spill file can be made in `scratch`.
    pub fn new(options: WalkOptions, scratch: &Path) -> io::Result<Self> {
        let mut walk = Walk {
            spill: Spill::new(scratch)?,
            stack: Vec::new(),
            rel: String::new(),
            name: Vec::new(),
            options,
        };
        let id = walk.dir_id(&walk.options.base)?;
        let top = walk.load(id)?;
        walk.stack.push(top);
        Ok(walk)
    }

    fn dir_id(&self, dir: &Path) -> io::Result<Option<(u64, u64)>> {
        if self.options.symlinks != Symlinks::Follow {
            return Ok(None);
        }
        let m = fs::metadata(dir)?;
        Ok(Some((m.dev(), m.ino())))
    }

    /// Reads and sorts the directory at `rel`.
    fn load(&mut self, id: Option<(u64, u64)>) -> io::Result<Frame> {
        let mut held: usize = self.stack.iter().map(|f| f.names.held()).sum();
        if held > self.options.names_bytes_max / 2 {
            for f in &mut self.stack {
                if matches!(f.names, Names::Memory { .. }) && f.names.held() > EVICT_BYTES_MIN {
                    f.names.evict(&mut self.spill)?;
                }
            }
            held = self.stack.iter().map(|f| f.names.held()).sum();
        }
        let budget = self.options.names_bytes_max.saturating_sub(held);
        let budget = budget.max(BUDGET_BYTES_MIN.min(self.options.names_bytes_max));
        let dir = self.options.base.join(&self.rel);
        let mut names = NamesBuilder::default();
        for item in fs::read_dir(&dir)? {
            let item = item?;
            let mut name = item.file_name().into_vec();
            let kind = match self.classify(&dir, &name, || item.file_type(), id) {
                Ok(Some(kind)) => kind,
                Ok(None) => continue,
                Err(_) => NameKind::Odd,
            };
            if kind == NameKind::Dir {
                name.push(b'/');
            }
            names.push(&name, kind, budget, &mut self.spill)?;
        }
        Ok(Frame { names: names.finish(&mut self.spill)?, id })
    }

    /// What a name is; `None` when it is left out; the reason when it cannot be an entry.
    fn classify(
        &self,
        dir: &Path,
        name: &[u8],
        file_type: impl Fn() -> io::Result<fs::FileType>,
        dir_id: Option<(u64, u64)>,
    ) -> Result<Option<NameKind>, String> {
        if str::from_utf8(name).is_err() {
            return Err("its name is not UTF-8; rename it".into());
        }
        let ft = file_type().map_err(|e| describe(&e))?;
        if ft.is_file() {
            return Ok(Some(NameKind::File));
        }
        if ft.is_dir() {
            return Ok(Some(NameKind::Dir));
        }
        if !ft.is_symlink() {
            return Err(special(ft));
        }
        match self.options.symlinks {
            Symlinks::Keep => Ok(Some(NameKind::Link)),
            Symlinks::Skip => Ok(None),
            Symlinks::Error => Err("it is a symbolic link; choose --symlinks keep, follow or skip".into()),
            Symlinks::Follow => {
                let path = dir.join(std::ffi::OsStr::from_bytes(name));
                let m = fs::metadata(&path).map_err(|e| match e.raw_os_error() {
                    Some(libc::ENOENT) => "it is a link to nothing; remove it, or use --symlinks keep".into(),
                    Some(libc::ELOOP) => "it is a link that leads back to itself; remove it".into(),
                    _ => describe(&e),
                })?;
                if m.is_file() {
                    return Ok(Some(NameKind::Link));
                }
                if !m.is_dir() {
                    return Err(special(m.file_type()));
                }
                let id = (m.dev(), m.ino());
                if dir_id == Some(id) || self.stack.iter().any(|f| f.id == Some(id)) {
                    return Err("it is a link to a directory it lies in (a loop); use --symlinks keep".into());
                }
                Ok(Some(NameKind::Dir))
            }
        }
    }

    fn join(&self) -> String {
        // Names are UTF-8: `classify` calls every other one odd.
        let name = String::from_utf8_lossy(&self.name);
        let mut path = String::with_capacity(self.rel.len() + 1 + name.len());
        if !self.rel.is_empty() {
            path.push_str(&self.rel);
            path.push('/');
        }
        path.push_str(&name);
        path
    }

    /// The escaped path and the reason of an odd name.
    fn odd(&self) -> Step {
        let dir = self.options.base.join(&self.rel);
        let full = dir.join(std::ffi::OsStr::from_bytes(&self.name));
        let file_type = || fs::symlink_metadata(&full).map(|m| m.file_type());
        let id = self.stack.last().and_then(|f| f.id);
        let why = match self.classify(&dir, &self.name, file_type, id) {
            Err(why) => why,
            Ok(_) => "it changed while the tree was read; run again".into(),
        };
        let slash = if self.rel.is_empty() { "" } else { "/" };
        Step::Fault { path: format!("{}{slash}{}", self.rel, self.name.escape_ascii()), why }
    }

    /// The next step; `None` at the end.
    ///
    /// # Errors
    /// When the spill file fails; everything wrong with the tree is a [`Step::Fault`].
    pub fn next_step(&mut self) -> io::Result<Option<Step>> {
        loop {
            let Some(frame) = self.stack.last_mut() else { return Ok(None) };
            let Some(kind) = frame.names.next(&mut self.name, &self.spill)? else {
                self.stack.pop();
                let end = self.stack.iter().map(|f| f.names.spill_end()).max().unwrap_or(0);
                self.spill.cut(end)?;
                if self.stack.is_empty() {
                    return Ok(None);
                }
                let parent = self.rel.rfind('/').unwrap_or(0);
                let path = self.rel.clone();
                self.rel.truncate(parent);
                return Ok(Some(Step::DirEnd { path }));
            };
            match kind {
                NameKind::File => return Ok(Some(Step::File { path: self.join(), follow: false })),
                NameKind::Link if self.options.symlinks == Symlinks::Follow => {
                    return Ok(Some(Step::File { path: self.join(), follow: true }));
                }
                NameKind::Link => return Ok(Some(Step::Link { path: self.join() })),
                NameKind::Odd => return Ok(Some(self.odd())),
                NameKind::Dir => {
                    self.name.pop();
                    let path = self.join();
                    if self.options.exclude.contains(&path) {
                        continue;
                    }
                    let above = std::mem::replace(&mut self.rel, path);
                    let loaded = self.dir_id(&self.options.base.join(&self.rel)).and_then(|id| self.load(id));
                    match loaded {
                        Ok(frame) => self.stack.push(frame),
                        Err(e) if e.kind() == io::ErrorKind::StorageFull => return Err(e),
                        Err(e) => {
                            let path = std::mem::replace(&mut self.rel, above) + "/";
                            return Ok(Some(Step::Fault { path, why: describe(&e) }));
                        }
                    }
                }
            }
        }
    }
}

fn special(ft: fs::FileType) -> String {
    let what = if ft.is_fifo() {
        "a named pipe"
    } else if ft.is_socket() {
        "a socket"
    } else if ft.is_block_device() || ft.is_char_device() {
        "a device"
    } else {
        "no file, directory or link"
    };
    format!("it is {what}, which a dataset cannot hold; move it out of the tree")
}

/// What lies in the reserved top-level `fletch/` beside Fletch's own.
///
/// # Errors
/// When the directory is there and cannot be read.
pub fn reserved_strangers(base: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let dir = match fs::read_dir(base.join("fletch")) {
        Ok(dir) => dir,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(found);
        }
        Err(e) => return Err(e),
    };
    for item in dir {
        let name = item?.file_name();
        if !["versions", "layouts", "chunks", "tags"].iter().any(|own| name == *own) && found.len() < 5 {
            found.push(format!("fletch/{}", name.as_bytes().escape_ascii()));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
#[path = "walk/tests.rs"]
mod tests;
