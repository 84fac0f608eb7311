//! A server whose disk or processor slows down: the read bandwidth and the CPU time of a program, by cgroups
//! of version 1.

use std::{
    fs,
    os::linux::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// In which the CPU time of a program is counted, in microseconds.
const CPU_PERIOD_US: f64 = 20_000.0;

/// Cgroups for one program. Its page cache is small, its reads of one disk have a bandwidth, and it has a
/// part of a core.
pub struct Throttle {
    /// Those of the controllers `blkio`, `memory` and `cpu`.
    dirs: [PathBuf; 3],
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
        let dirs = ["blkio", "memory", "cpu"].map(|c| Path::new("/sys/fs/cgroup").join(c).join(&name));
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
        let enter =
            "for d in \"$1\" \"$2\" \"$3\"; do echo $$ > \"$d/cgroup.procs\"; done; shift 3; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", enter, "sh"]).args(&self.dirs).arg(program);
        command
    }

    /// Sets how many cores the program may use; `None` is all.
    pub fn set_cores(&self, cores: Option<f64>) {
        let write = |name: &str, us: i64| {
            fs::write(self.dirs[2].join(name), us.to_string()).expect("a quota of CPU time");
        };
        write("cpu.cfs_period_us", CPU_PERIOD_US as i64);
        write("cpu.cfs_quota_us", cores.map_or(-1, |n| (n * CPU_PERIOD_US) as i64));
    }

    /// Sets the bandwidth of reads in bytes a second; `None` is that of the disk.
    pub fn set_disk(&self, bytes_per_s: Option<f64>) {
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
