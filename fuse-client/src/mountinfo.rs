//! `/proc/self/mountinfo`: what is mounted where, asked without touching any mount.

use std::{ffi::OsString, io, os::unix::ffi::OsStringExt, path::Path, path::PathBuf};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// `major:minor` of its device.
    pub device: String,
    /// Where it is.
    pub dir: PathBuf,
    /// Its type, `fuse.fletch` for ours.
    pub fs_type: String,
}

/// The type our mounts have.
pub const FS_TYPE: &str = "fuse.fletch";

/// The topmost mount at exactly `dir`.
///
/// # Errors
/// When the table cannot be read.
pub fn at(dir: &Path) -> io::Result<Option<MountEntry>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(parse(&table).into_iter().rfind(|m| m.dir == dir))
}

/// The mount of a device, if it is still there.
///
/// # Errors
/// When the table cannot be read.
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
    // Optional fields end at a lone dash; the type follows.
    let fs_type = text(fields.skip_while(|f| *f != b"-").nth(1)?);
    Some(MountEntry { device, dir, fs_type })
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
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
    fn lines_as_the_kernel_writes_them() {
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
