//! Reads the mount table, `/proc/self/mountinfo`, without touching any mount.

use std::{ffi::OsString, io, os::unix::ffi::OsStringExt, path::Path, path::PathBuf};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The device, as `major:minor`.
    pub device: String,
    /// The directory.
    pub dir: PathBuf,
    /// The file system type: `fuse.fletch` for a mount of Fletch.
    pub fs_type: String,
}

/// The file system type of a mount of Fletch.
pub const FS_TYPE: &str = "fuse.fletch";

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

fn parse(table: &[u8]) -> Vec<MountEntry> {
    table.split(|b| *b == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|b| *b == b' ');
    let device = text(fields.nth(2)?);
    let dir = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    // A lone dash ends the optional fields, and the type follows.
    let fs_type = text(fields.skip_while(|f| *f != b"-").nth(1)?);
    Some(MountEntry { device, dir, fs_type })
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
            MountEntry { device: "0:52".into(), dir: "/data/a b\\c".into(), fs_type: FS_TYPE.into() }
        );
    }
}
