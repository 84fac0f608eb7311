//! Starts the user's own server again when it is gone, with the command that the mount was given for that.
//!
//! The command (`fletch up`) has the environment of the terminal that made the mount, so it also gives the
//! server the credentials of that terminal. Reads wait meanwhile, as for any server that restarts.

use crate::keeper;
use std::{path::PathBuf, process::Stdio, time::Duration};
use tokio::{
    process::Command,
    time::{Instant, timeout},
};

/// The shortest time between two attempts.
const EVERY: Duration = Duration::from_secs(5);
/// The longest time for the command. It may ask a program of the user for credentials, which may hang.
const WITHIN: Duration = Duration::from_secs(25);

/// Starts a server again.
#[derive(Debug)]
pub struct Restart {
    program: PathBuf,
    tried: Option<Instant>,
}

impl Restart {
    /// Returns what runs `program` with the argument `up`.
    #[must_use]
    pub fn with(program: PathBuf) -> Self {
        Restart { program, tried: None }
    }

    /// Runs the command, unless it ran a moment ago, and waits until it ends.
    pub async fn run(&mut self) {
        if self.tried.is_some_and(|at| at.elapsed() < EVERY) {
            return;
        }
        let mut command = Command::new(&self.program);
        command
            .arg("up")
            .env_remove(keeper::SOCKET_VARIABLE)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let done = timeout(WITHIN, command.output()).await;
        self.tried = Some(Instant::now());
        let command = format!("{} up", self.program.display());
        match done {
            Ok(Ok(done)) if done.status.success() => {
                tracing::warn!(command, "the server runs again, with the credentials of the terminal");
            }
            Ok(Ok(done)) => {
                let error = String::from_utf8_lossy(&done.stderr);
                tracing::error!(command, error = error.trim(), "the server could not be mended");
            }
            Ok(Err(error)) => tracing::error!(command, %error, "the server could not be mended"),
            Err(_) => tracing::error!(command, "the server could not be mended within {WITHIN:?}"),
        }
    }
}
