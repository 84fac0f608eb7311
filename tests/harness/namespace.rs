//! A test in namespaces of its own, where every user may open `/dev/fuse`, as on most machines.
//!
//! A machine may give that device to root only. The namespace has another node of the same device, with the
//! mode 0666, and an `/etc/fuse.conf` that lets users share their mounts. Its two users [`ANN`] and [`BOB`]
//! have accounts, because `fusermount3` asks for their names. The machine keeps its own files.

use std::process::Command;

/// Prepares the namespace, and becomes the program that its arguments name.
const SETUP: &str = r#"set -eu
dir=$1
shift
mount -t tmpfs -o mode=0755 fletch-test "$dir"
mknod -m 0666 "$dir/fuse" c 10 229
echo user_allow_other >"$dir/fuse.conf"
cp /etc/passwd "$dir/passwd"
echo "fletch-ann:x:12345:12345::/:/bin/sh
fletch-bob:x:12346:12346::/:/bin/sh" >>"$dir/passwd"
mount --bind "$dir/fuse" /dev/fuse
mount --bind "$dir/passwd" /etc/passwd
[ ! -e /etc/fuse.conf ] || mount --bind "$dir/fuse.conf" /etc/fuse.conf
exec "$@""#;
/// The users of the namespace.
pub const ANN: u32 = 12_345;
pub const BOB: u32 = 12_346;
/// Set in the namespace.
const VARIABLE: &str = "TEST_IN_NAMESPACE";

/// Returns a command that runs `program` in such namespaces, which end with it.
fn within(dir: &std::path::Path, program: &std::path::Path) -> Command {
    let mut c = Command::new("unshare");
    // All that the test started ends with it.
    c.args([
        "-m",
        "--propagation",
        "private",
        "-p",
        "-f",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        SETUP,
        "sh",
    ])
    .arg(dir)
    .arg(program);
    c.env(VARIABLE, "1");
    c
}

/// Returns why this process cannot make such a namespace.
///
/// # Errors
/// What the commands say.
pub(crate) fn check() -> Result<(), String> {
    if is_within() {
        return Ok(());
    }
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let made = within(dir.path(), std::path::Path::new("true")).output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&made.stderr).trim().to_owned();
    if made.status.success() { Ok(()) } else { Err(format!("no namespace of its own: {said}")) }
}

fn is_within() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Whether this process is in such a namespace. If not, runs the test of this name again in one.
///
/// # Panics
/// If the test fails there.
#[must_use]
pub fn is_in_own(test: &str) -> bool {
    if is_within() {
        return true;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut c = within(dir.path(), &std::env::current_exe().expect("this program"));
    let ended = c.args([test, "--exact", "--nocapture", "--test-threads", "1"]).status().expect("unshare");
    assert!(ended.success(), "{test} failed in its namespace: {ended}");
    false
}
