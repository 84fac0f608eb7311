//! Walks a local tree in the order of a version's entries.
//!
//! Never opens a file of the tree.
//!
//! Invariants:
//! 1. Files, links and faults come in the byte order of their entry paths, with directories as `name/`. So
//!    the walk can be merged with the rows of a parent.
//! 2. `names_bytes_max` and the depth of the tree bound the memory, not the size of the tree.
//! 3. No file is opened. A name is looked up only if the directory does not say what it is, or links are
//!    followed.

use super::content::describe_io;
use super::dir_names::{DirNames, DirNamesBuilder, NameKind};
use super::outage::is_outage;
use super::spill::Spill;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The default memory for names, in bytes.
pub const NAMES_BYTES_MAX: usize = 48 << 20;
/// The names of a directory below this size stay in memory.
const SPILL_BYTES_MIN: usize = 64 << 10;
/// The memory that the names of a directory may always use during reading, in bytes.
const BUDGET_BYTES_MIN: usize = 1 << 20;

/// What a run does at symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Symlinks {
    /// Keep them as links, verbatim (the default).
    Keep,
    /// Read the file or directory that they point to, under the path of the link.
    Follow,
    /// Leave them out of the version.
    Skip,
    /// Treat them as faults.
    Error,
}

impl Symlinks {
    /// Returns the value on the command line.
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

/// One step of the walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A regular file.
    File {
        /// Its entry path.
        path: String,
        /// Whether the last component is a link to the file.
        follow: bool,
    },
    /// A symbolic link, kept as a link.
    Link {
        /// Its entry path.
        path: String,
    },
    /// The end of a directory: all entries below it came before.
    DirEnd {
        /// Its path, without a slash at the end.
        path: String,
    },
    /// A directory on another file system, which is not walked: an empty directory of the version.
    OtherFileSystem {
        /// Its path, without a slash at the end.
        path: String,
    },
    /// A name that cannot be an entry.
    Fault {
        /// Its path, with unprintable bytes escaped.
        path: String,
        /// Why, and what to do next.
        why: String,
    },
    /// A directory that cannot be read: what lies below it is not known.
    Unreadable {
        /// Its path, with a slash at the end.
        path: String,
        /// Why, and what to do next.
        why: String,
    },
    /// A directory whose file system fails.
    Outage {
        /// Its path, without a slash at the end.
        path: String,
        /// The error of the operating system.
        errno: i32,
    },
}

/// The options of a walk.
#[derive(Debug, Clone)]
pub struct WalkOptions {
    /// The top of the tree.
    pub base: PathBuf,
    /// What the walk does at links.
    pub symlinks: Symlinks,
    /// Relative paths of directories that are not walked, without a slash at the end.
    pub exclude: BTreeSet<String>,
    /// Whether directories on other file systems than the top are not walked.
    pub one_file_system: bool,
    /// The memory for names, in bytes.
    pub names_bytes_max: usize,
}

#[derive(Debug)]
struct Frame {
    names: DirNames,
    /// Device and inode, known only when a rule needs them.
    id: Option<(u64, u64)>,
}

/// A walk of a local tree.
#[derive(Debug)]
pub struct Walk {
    options: WalkOptions,
    spill: Spill,
    stack: Vec<Frame>,
    /// Path of the top frame's directory, without a slash at the end.
    rel: String,
    name: Vec<u8>,
}

impl Walk {
    /// Begins at the top of the tree.
    ///
    /// # Errors
    /// When the top cannot be read, or the spill file cannot be created in `scratch`.
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
        if self.options.symlinks != Symlinks::Follow && !self.options.one_file_system {
            return Ok(None);
        }
        let m = fs::metadata(dir)?;
        Ok(Some((m.dev(), m.ino())))
    }

    /// Reads and sorts the directory at `rel`.
    fn load(&mut self, id: Option<(u64, u64)>) -> io::Result<Frame> {
        let mut held: usize = self.stack.iter().map(|f| f.names.memory_bytes()).sum();
        if held > self.options.names_bytes_max / 2 {
            for f in &mut self.stack {
                if matches!(f.names, DirNames::Memory { .. }) && f.names.memory_bytes() > SPILL_BYTES_MIN {
                    f.names.spill(&mut self.spill)?;
                }
            }
            held = self.stack.iter().map(|f| f.names.memory_bytes()).sum();
        }
        let budget = self.options.names_bytes_max.saturating_sub(held);
        let budget = budget.max(BUDGET_BYTES_MIN.min(self.options.names_bytes_max));
        let dir = self.options.base.join(&self.rel);
        let mut names = DirNamesBuilder::default();
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

    /// Reads the directory at `rel`. Returns `None` if it is on another file system that is not walked.
    fn enter(&mut self) -> io::Result<Option<Frame>> {
        let id = self.dir_id(&self.options.base.join(&self.rel))?;
        let device = |id: Option<(u64, u64)>| id.map(|id| id.0);
        let top = self.stack.first().and_then(|frame| frame.id);
        if self.options.one_file_system && device(id) != device(top) {
            return Ok(None);
        }
        self.load(id).map(Some)
    }

    /// Returns the kind of a name, `None` when it is left out, or the reason why it cannot be an entry.
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
        let ft = file_type().map_err(|e| describe_io(&e))?;
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
                    Some(libc::ELOOP) => "it is a link to itself; remove it".into(),
                    _ => describe_io(&e),
                })?;
                if m.is_file() {
                    return Ok(Some(NameKind::Link));
                }
                if !m.is_dir() {
                    return Err(special(m.file_type()));
                }
                let id = (m.dev(), m.ino());
                if dir_id == Some(id) || self.stack.iter().any(|f| f.id == Some(id)) {
                    return Err("it is a link to a directory above it (a loop); use --symlinks keep".into());
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

    /// Returns the fault of an odd name.
    fn odd(&self) -> Step {
        let dir = self.options.base.join(&self.rel);
        let full = dir.join(std::ffi::OsStr::from_bytes(&self.name));
        let file_type = || fs::symlink_metadata(&full).map(|m| m.file_type());
        let id = self.stack.last().and_then(|f| f.id);
        let why = match self.classify(&dir, &self.name, file_type, id) {
            Err(why) => why,
            Ok(_) => "it changed during the run; run again".into(),
        };
        let slash = if self.rel.is_empty() { "" } else { "/" };
        Step::Fault { path: format!("{}{slash}{}", self.rel, self.name.escape_ascii()), why }
    }

    /// Returns the next step; `None` at the end.
    ///
    /// # Errors
    /// When the spill file fails. An error of the tree is a [`Step::Fault`], not an error of this call.
    pub fn next_step(&mut self) -> io::Result<Option<Step>> {
        loop {
            let Some(frame) = self.stack.last_mut() else { return Ok(None) };
            let Some(kind) = frame.names.next(&mut self.name, &self.spill)? else {
                self.stack.pop();
                let end = self.stack.iter().map(|f| f.names.spill_end()).max().unwrap_or(0);
                self.spill.truncate(end)?;
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
                    match self.enter() {
                        Ok(Some(frame)) => self.stack.push(frame),
                        Ok(None) => {
                            let path = std::mem::replace(&mut self.rel, above);
                            return Ok(Some(Step::OtherFileSystem { path }));
                        }
                        Err(e) if e.kind() == io::ErrorKind::StorageFull => return Err(e),
                        Err(e) if is_outage(&e) => {
                            let path = std::mem::replace(&mut self.rel, above);
                            return Ok(Some(Step::Outage { path, errno: e.raw_os_error().unwrap_or(0) }));
                        }
                        Err(e) => {
                            let path = std::mem::replace(&mut self.rel, above) + "/";
                            return Ok(Some(Step::Unreadable { path, why: describe_io(&e) }));
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
        "neither a file nor a directory nor a link"
    };
    format!("it is {what}, which a dataset cannot hold; move it out of the tree")
}

/// The directories that Fletch creates in the reserved directory `fletch/`.
pub const RESERVED: [&str; 6] = ["versions", "layouts", "chunks", "tags", "runs", "erased"];

/// Returns up to five paths at or below the top-level name `fletch` that are left out of the version,
/// although Fletch did not create them, each with the reason.
///
/// # Errors
/// When the directory exists and cannot be read.
pub fn reserved_extras(base: &Path, symlinks: Symlinks) -> io::Result<Vec<(String, &'static str)>> {
    let mut found = Vec::new();
    let top = base.join("fletch");
    let linked = fs::symlink_metadata(&top).is_ok_and(|m| m.is_symlink());
    if linked && symlinks != Symlinks::Follow {
        // An entry like every other link, or left out like every other link.
        return Ok(found);
    }
    let dir = match fs::read_dir(&top) {
        Ok(dir) => dir,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(found);
        }
        Err(e) => return Err(e),
    };
    if linked {
        found.push(("fletch".to_owned(), "a link to a directory"));
    }
    for item in dir {
        let name = item?.file_name();
        let path = || format!("fletch/{}", name.as_bytes().escape_ascii());
        let why = match RESERVED.iter().any(|own| name == *own) {
            false => "not a name of Fletch",
            true if fs::metadata(top.join(&name)).is_ok_and(|m| m.is_dir()) => continue,
            true => "not a directory",
        };
        if found.len() < 5 {
            found.push((path(), why));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
#[path = "walk/tests.rs"]
mod tests;
