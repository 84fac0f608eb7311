//! A log file of bounded size. When it is full, it becomes `FILE.1`, and the older `FILE.1` is gone.

use parking_lot::Mutex;
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};
use tracing_subscriber::fmt::MakeWriter;

/// Where log lines go, and how long the file may become.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFileConfig {
    /// The file.
    pub path: PathBuf,
    /// The most bytes of the file. The older file has as many.
    pub bytes_max: u64,
}

/// An open log file, which all threads share.
#[derive(Debug, Clone)]
pub struct LogFile(Arc<Mutex<Open>>);

#[derive(Debug)]
struct Open {
    config: LogFileConfig,
    older: PathBuf,
    file: File,
    bytes: u64,
}

impl LogFile {
    /// Opens the file for appending, for this user alone.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(config: LogFileConfig) -> io::Result<Self> {
        let file = append(&config.path)?;
        let bytes = file.metadata()?.len();
        let mut older = config.path.clone().into_os_string();
        older.push(".1");
        Ok(LogFile(Arc::new(Mutex::new(Open { older: older.into(), config, file, bytes }))))
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

impl Open {
    /// Begins a new file. If the full one cannot be moved, it is cut, so that the bound holds.
    fn rotate(&mut self) -> io::Result<()> {
        let moved = std::fs::rename(&self.config.path, &self.older).and_then(|()| append(&self.config.path));
        match moved {
            Ok(file) => self.file = file,
            Err(_) => self.file.set_len(0)?,
        }
        self.bytes = 0;
        Ok(())
    }
}

impl Write for &LogFile {
    /// Writes one line, whole.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut open = self.0.lock();
        let length = line.len() as u64;
        if open.bytes > 0 && open.bytes + length > open.config.bytes_max {
            open.rotate()?;
        }
        open.file.write_all(line)?;
        open.bytes += length;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().file.flush()
    }
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = &'a LogFile;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_full_file_becomes_the_older_one_and_both_stay_bounded() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("log");
        let config = LogFileConfig { path: path.clone(), bytes_max: 100 };
        let log = LogFile::open(config.clone()).expect("open");
        for i in 0..50 {
            (&log).write_all(format!("line {i:02} of the log\n").as_bytes()).expect("write");
        }
        let text = |path: &Path| std::fs::read_to_string(path).expect("read");
        let (new, old) = (text(&path), text(&dir.path().join("log.1")));
        assert!(new.ends_with("line 49 of the log\n") && new.len() <= 100 && old.len() <= 100, "{new}{old}");
        let all = format!("{old}{new}");
        let first: usize = all[5..7].parse().expect("a number");
        let lines: String = (first..50).map(|i| format!("line {i:02} of the log\n")).collect();
        assert_eq!(all, lines, "no line is cut or lost in between");
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 2);
        let mode = std::fs::metadata(&path).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(log);
        let again = LogFile::open(LogFileConfig { bytes_max: 1000, ..config }).expect("open");
        (&again).write_all(b"after a restart\n").expect("write");
        assert_eq!(text(&path), format!("{new}after a restart\n"), "appended");
    }

    #[test]
    fn a_file_that_cannot_be_moved_is_cut() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::create_dir_all(dir.path().join("log.1/full")).expect("mkdir");
        let path = dir.path().join("log");
        let log = LogFile::open(LogFileConfig { path: path.clone(), bytes_max: 40 }).expect("open");
        for i in 0..50 {
            (&log).write_all(format!("line {i:02}\n").as_bytes()).expect("write");
        }
        let length = std::fs::metadata(&path).expect("metadata").len();
        assert!((1..=40).contains(&length), "{length}");
    }
}
