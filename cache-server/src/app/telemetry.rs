//! Writes log lines to stderr, or to a file of bounded size, and watches how long reads wait.

mod event;
mod log_file;
mod read_watch;

use anyhow::Context as _;
pub use event::Event;
pub use log_file::{LogFile, LogFileConfig};
pub use read_watch::ReadWatch;
use std::{fmt, io::IsTerminal as _, str::FromStr};
use tracing_subscriber::EnvFilter;

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object on each line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(format!("{s:?} is not a log format; write text or json")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    }
}

/// Starts logging for the whole process: to `file`, or to stderr.
///
/// `FLETCH_LOG` (or `RUST_LOG`) is the filter; the default is `info`.
///
/// # Errors
/// If the filter is not valid, the file cannot be opened, or logging was started before.
pub fn init(format: LogFormat, file: Option<LogFileConfig>) -> anyhow::Result<()> {
    let text = ["FLETCH_LOG", "RUST_LOG"].iter().find_map(|v| std::env::var(v).ok());
    let text = text.unwrap_or_else(|| "info".to_owned());
    let filter = EnvFilter::try_new(&text)
        .map_err(|e| anyhow::anyhow!("FLETCH_LOG={text:?} is not a valid filter: {e}"))?;
    // A line that finds no room is lost. Reported, it would be a panic: standard error may be on that disk.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    let started = match (file, format) {
        (None, format) => {
            // Redirected to a file, it must not contain colour codes.
            let builder = builder.with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
            match format {
                LogFormat::Text => builder.try_init(),
                LogFormat::Json => builder.json().try_init(),
            }
        }
        (Some(config), format) => {
            let path = config.path.clone();
            let file = LogFile::open(config).with_context(|| {
                let shown = path.display();
                format!("cannot open the log file {shown}; create its directory, or give another --log-file")
            })?;
            let builder = builder.with_writer(file).with_ansi(false);
            match format {
                LogFormat::Text => builder.try_init(),
                LogFormat::Json => builder.json().try_init(),
            }
        }
    };
    started.map_err(|e| anyhow::anyhow!("cannot start logging: {e}"))
}
