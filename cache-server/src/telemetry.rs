//! Writes log lines to stderr.

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

/// Starts logging for the whole process.
///
/// `FLETCH_LOG` (or `RUST_LOG`) is the filter; the default is `info`.
///
/// # Errors
/// If the filter is not valid, or logging was started before.
pub fn init(format: LogFormat) -> anyhow::Result<()> {
    let text = ["FLETCH_LOG", "RUST_LOG"].iter().find_map(|v| std::env::var(v).ok());
    let text = text.unwrap_or_else(|| "info".to_owned());
    let filter = EnvFilter::try_new(&text)
        .map_err(|e| anyhow::anyhow!("FLETCH_LOG={text:?} is not a valid filter: {e}"))?;
    // A log file must not contain colour codes.
    let is_terminal = std::io::stderr().is_terminal();
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(is_terminal);
    let started = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    started.map_err(|e| anyhow::anyhow!("cannot start logging: {e}"))
}
