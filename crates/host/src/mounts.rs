//! Reads the mount table, `/proc/self/mountinfo`, and finds mounts of Fletch whose process is dead.
//!
//! A call to a mount whose process hangs does not return. So only [`health`] touches a mount, on a thread of
//! its own, and waits a bounded time for the answer.

use nix::errno::Errno;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

/// How long [`of_fletch`] waits for all mounts together.
pub const HEALTH_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The device, as `major:minor`.
    pub device: String,
    /// The directory.
    pub dir: PathBuf,
    /// The file system type: `fuse.fletch` for a mount of Fletch.
    pub fs_type: String,
    /// What the mounting program called its source: `fletch:NAME` for a mount of Fletch.
    pub source: String,
}

/// File systems of other machines.
const NETWORK: &[&str] = &[
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "orangefs",
    "smb3",
    "smbfs",
    "virtiofs",
    "vboxsf",
    "wekafs",
];

/// Returns whether a file system type is one of a network, or of a program that may use one.
#[must_use]
pub fn is_network(fs_type: &str) -> bool {
    NETWORK.contains(&fs_type) || fs_type == "fuse" || fs_type.starts_with("fuse.")
}

/// The file system type of a mount of Fletch.
pub const FS_TYPE: &str = "fuse.fletch";
/// How the source of a mount of Fletch begins. The name of the dataset follows.
pub const SOURCE_PREFIX: &str = "fletch:";

impl MountEntry {
    /// Returns the name of the mounted dataset; `None` if this is no mount of Fletch.
    #[must_use]
    pub fn dataset(&self) -> Option<&str> {
        let of_fletch = self.fs_type == FS_TYPE;
        self.source.strip_prefix(SOURCE_PREFIX).filter(|_| of_fletch)
    }
}

/// Whether the process of a FUSE mount answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It answers, or the mount does not let this user ask it.
    Living,
    /// The kernel says that no process serves the mount (ENOTCONN).
    Dead,
    /// There was no answer in time: the process hangs or is stopped.
    Silent,
}

/// Asks the process of the mount at `dir`, and waits at most `within`.
///
/// The kernel asks for the totals of a file system each time, and caches no answer. Attributes, names and
/// pages it may answer from its caches when the process is dead.
#[must_use]
pub fn health(dir: &Path, within: Duration) -> Health {
    answer(&ask(dir), Instant::now() + within)
}

/// Returns the mounts of Fletch that this process sees, each with its health.
///
/// A mount that another one hides is left out.
///
/// # Errors
/// The table cannot be read.
pub fn of_fletch() -> io::Result<Vec<(MountEntry, Health)>> {
    Ok(of_fletch_in(&std::fs::read("/proc/self/mountinfo")?))
}

/// Returns the mounts of Fletch in the text of a mount table, each with its health.
#[must_use]
pub fn of_fletch_in(table: &[u8]) -> Vec<(MountEntry, Health)> {
    let mounts = visible_of_fletch(table);
    let until = Instant::now() + HEALTH_WITHIN;
    let asked: Vec<_> = mounts.into_iter().map(|m| (ask(&m.dir), m)).collect();
    asked.into_iter().map(|(told, m)| (m, answer(&told, until))).collect()
}

/// Returns the mounts of Fletch whose process is dead.
///
/// # Errors
/// The table cannot be read.
pub fn dead_mounts() -> io::Result<Vec<MountEntry>> {
    let dead = |(mount, health)| (health == Health::Dead).then_some(mount);
    Ok(of_fletch()?.into_iter().filter_map(dead).collect())
}

/// Begins to ask a mount for its totals. The thread ends when the mount answers or the process ends.
fn ask(dir: &Path) -> Receiver<Health> {
    let (tell, told) = channel();
    let dir = dir.to_owned();
    let question = move || {
        let dead = matches!(nix::sys::statvfs::statvfs(&dir), Err(Errno::ENOTCONN | Errno::ECONNABORTED));
        // The receiver is gone if the answer came too late.
        let _unheard = tell.send(if dead { Health::Dead } else { Health::Living });
    };
    // Without a thread there is no answer, which counts as silence.
    drop(std::thread::Builder::new().name("fletch-health".into()).spawn(question));
    told
}

fn answer(told: &Receiver<Health>, until: Instant) -> Health {
    told.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or(Health::Silent)
}

/// Returns the topmost mount of each directory, if it is one of Fletch.
fn visible_of_fletch(table: &[u8]) -> Vec<MountEntry> {
    let topmost: BTreeMap<PathBuf, MountEntry> =
        parse(table).into_iter().map(|m| (m.dir.clone(), m)).collect();
    topmost.into_values().filter(|m| m.dataset().is_some()).collect()
}

/// Returns the topmost mount at exactly `dir`.
///
/// # Errors
/// The table cannot be read.
pub fn at(dir: &Path) -> io::Result<Option<MountEntry>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(parse(&table).into_iter().rfind(|m| m.dir == dir))
}

/// Returns the mount of a device, if it still exists.
///
/// # Errors
/// The table cannot be read.
pub fn of_device(device: &str) -> io::Result<Option<MountEntry>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(parse(&table).into_iter().find(|m| m.device == device))
}

/// Returns the mount whose file system holds `path`, an absolute path without links.
#[must_use]
pub fn holding(table: &[u8], path: &Path) -> Option<MountEntry> {
    let above = parse(table).into_iter().filter(|m| path.starts_with(&m.dir));
    // Of two mounts at one directory, the later line is the topmost.
    above.max_by_key(|m| m.dir.components().count())
}

/// Parses the text of a mount table. Leaves out lines that are not whole.
#[must_use]
pub fn parse(table: &[u8]) -> Vec<MountEntry> {
    table.split(|b| *b == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|b| *b == b' ');
    let device = text(fields.nth(2)?);
    let dir = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    // A lone dash ends the optional fields, and the type follows.
    let mut after = fields.skip_while(|f| *f != b"-").skip(1);
    let fs_type = text(after.next()?);
    let source = text(&unescape(after.next()?));
    Some(MountEntry { device, dir, fs_type, source })
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

/// Decodes the octal escapes that the kernel writes for space, tab, newline and backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                after
            }
            _ => {
                out.push(*first);
                tail
            }
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_lines_as_the_kernel_writes_them() {
        let table = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
            60 1 0:52 / /data/a\\040b\\134c ro,nosuid shared:3 master:2 - fuse.fletch fletch:x ro\n\
            garbage\n";
        let all = parse(table);
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].dir, Path::new("/mnt2"));
        assert_eq!(
            all[1],
            MountEntry {
                device: "0:52".into(),
                dir: "/data/a b\\c".into(),
                fs_type: FS_TYPE.into(),
                source: "fletch:x".into()
            }
        );
        assert_eq!((all[0].dataset(), all[1].dataset()), (None, Some("x")));
    }

    #[test]
    fn only_visible_mounts_of_fletch_are_asked() {
        let table = b"1 0 0:1 / / rw - overlay o rw\n\
            2 1 0:2 / /m/a ro - fuse.fletch fletch:a ro\n\
            3 1 0:3 / /m/b ro - fuse.fletch fletch:b ro\n\
            4 1 0:4 / /m/b ro - fuse.sshfs host:/b ro\n\
            5 1 0:5 / /m/c ro - fuse.fletch other ro\n\
            6 1 0:6 / /m/d ro - fuse.sshfs fletch:d ro\n";
        let dirs: Vec<PathBuf> = visible_of_fletch(table).into_iter().map(|m| m.dir).collect();
        assert_eq!(dirs, [Path::new("/m/a")], "hidden and foreign mounts are left alone");
        let on = |path: &str| holding(table, Path::new(path)).expect("a mount").fs_type;
        assert_eq!((on("/m/bb").as_str(), on("/m/b/x").as_str()), ("overlay", "fuse.sshfs"));
    }

    #[test]
    fn an_ordinary_directory_lives() {
        let dir = tempfile::tempdir().expect("tempdir");
        assert_eq!(health(dir.path(), Duration::from_secs(10)), Health::Living);
    }
}
