//! A disk that slows down: the read bandwidth of a program, by cgroups of version 1.

use std::{
    fs,
    os::linux::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// Cgroups for one program: its page cache is small, and its reads of one disk have a bandwidth.
pub struct Throttle {
    /// Those of the controllers `blkio` and `memory`.
    dirs: [PathBuf; 2],
    /// The disk, as `major:minor`.
    device: String,
}

impl Throttle {
    /// Makes cgroups for a program whose files are below `dir`, and that may use `memory` bytes with its page
    /// cache.
    ///
    /// # Errors
    /// Why there can be none: no root, or other cgroups.
    pub fn new(dir: &Path, memory: u64) -> Result<Self, String> {
        let io = |path: &Path, e| format!("{}: {e}", path.display());
        let at = fs::metadata(dir).map_err(|e| io(dir, e))?.st_dev();
        let (major, minor) = (libc::major(at), libc::minor(at));
        let block = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition has the bandwidth of its disk.
        let whole = if block.join("partition").exists() { block.join("../dev") } else { block.join("dev") };
        let device = fs::read_to_string(&whole).map_err(|e| io(&whole, e))?.trim().to_owned();
        let name = format!("fletch-bench-{}", std::process::id());
        let dirs = ["blkio", "memory"].map(|c| Path::new("/sys/fs/cgroup").join(c).join(&name));
        for dir in &dirs {
            fs::create_dir(dir).map_err(|e| io(dir, e))?;
        }
        let this = Throttle { dirs, device };
        let limit = this.dirs[1].join("memory.limit_in_bytes");
        fs::write(&limit, memory.to_string()).map_err(|e| io(&limit, e))?;
        Ok(this)
    }

    /// Returns a command that runs a program in the cgroups.
    pub fn command(&self, program: &Path) -> Command {
        let enter = "for d in \"$1\" \"$2\"; do echo $$ > \"$d/cgroup.procs\"; done; shift 2; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", enter, "sh"]).args(&self.dirs).arg(program);
        command
    }

    /// Sets the bandwidth of reads in bytes a second; `None` is that of the disk.
    pub fn set(&self, bytes_per_s: Option<f64>) {
        let line = format!("{} {}", self.device, bytes_per_s.map_or(0, |n| n as u64));
        fs::write(self.dirs[0].join("blkio.throttle.read_bps_device"), line).expect("a throttle");
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        for dir in &self.dirs {
            if let Err(e) = fs::remove_dir(dir) {
                eprintln!("cgroup {} stays: {e}", dir.display());
            }
        }
    }
}
