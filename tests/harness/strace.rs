//! strace, attached to running programs.

use crate::{bins::Running, watch::until};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// Attaches strace to all threads of the processes. It writes to the file `out`.
///
/// # Panics
/// If it cannot attach.
pub fn attach(args: &[&str], out: &Path, pids: &[u32]) -> Running {
    let mut c = Command::new("strace");
    c.args(["-f", "-qq", "-e", "signal=none"]).args(args).arg("-o").arg(out);
    pids.iter().for_each(|pid| {
        c.args(["-p", &pid.to_string()]);
    });
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut tracer = Running::spawn("strace", &mut c);
    let by = format!("TracerPid:\t{}", tracer.pid());
    for pid in pids {
        until("strace is attached", Duration::from_secs(20), || {
            assert!(tracer.alive(), "strace cannot attach to {pid}, or not write to {}", out.display());
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            tasks
                .map(|t| fs::read_to_string(t.path().join("status")).unwrap_or_default())
                .all(|s| s.lines().any(|l| l == by))
        });
    }
    tracer
}
