//! The `fletch-server` command.

use anyhow::Context as _;
use fletch_host::replace::stage_file;
use fletch_server::{
    NewToken, app,
    config::{self, Action, Config, ConfigError, Environment},
    telemetry,
};
use fletch_store::allocator;
use nix::sys::stat::{Mode, umask};
use std::{
    io::Write as _,
    os::{fd::AsFd as _, unix::fs::PermissionsExt as _},
    process::ExitCode,
    time::Duration,
};
use tokio::signal::unix::{SignalKind, signal};

/// How long the process waits at the end for blocking reads of origins.
const BLOCKING_TIMEOUT: Duration = Duration::from_millis(600);
const EXIT_FAILED: u8 = 1;
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    // Files of the state, the cache and the traces are for this user alone, also those of a later version.
    umask(Mode::from_bits_truncate(0o077));
    if !allocator::map_from(allocator::CHUNKS) {
        eprintln!(
            "fletch-server: the allocator rejected its threshold for mapping chunks; memory may exceed \
                memory.max"
        );
    }
    let action = match config::read(std::env::args_os(), &Environment::own()) {
        Ok(task) => task,
        Err(ConfigError::Usage(e)) => e.exit(),
        Err(ConfigError::Faults(faults)) => {
            for fault in faults {
                tell(format_args!("fletch-server: {fault}"));
            }
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let done = match action {
        Action::Show(config) | Action::Check(config) => {
            print!("{}", config.show());
            Ok(())
        }
        Action::Serve(config) => serve(*config),
        Action::NewToken(new) => new_token(&new),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tell(format_args!("fletch-server: {e:#}"));
            ExitCode::from(EXIT_FAILED)
        }
    }
}

/// Writes a line to standard error, which may be a file on a full disk.
fn tell(line: std::fmt::Arguments<'_>) {
    let _unwritten = writeln!(std::io::stderr(), "{line}");
}

fn new_token(new: &NewToken) -> anyhow::Result<()> {
    let made = new.mint()?;
    match &made.appended {
        Some(file) => {
            eprintln!("appended to {}; a running server uses it within seconds", file.display())
        }
        None => eprint!("add this to the tokens file:\n{}", made.lines),
    }
    match &made.out {
        Some(file) => eprintln!("wrote the token to {}", file.display()),
        None => {
            println!("{}", made.token);
            if others_can_read_stdout() {
                eprintln!(
                    "fletch-server: other users can read the file that has the token now; change its mode, \
                        or use --out FILE"
                );
            }
        }
    }
    Ok(())
}

/// Returns whether stdout is a file that others than its owner may read.
fn others_can_read_stdout() -> bool {
    let file = std::io::stdout().as_fd().try_clone_to_owned().map(std::fs::File::from);
    file.and_then(|f| f.metadata()).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o077 != 0)
}

fn serve(config: Config) -> anyhow::Result<()> {
    let to_file = config.log_file.is_some();
    telemetry::init(config.log_format, config.log_file.clone())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(until_stopped(config));
    if let (Err(e), true) = (&served, to_file) {
        // Nobody may see stderr.
        tracing::error!("the server ends: {e:#}");
    }
    // An origin that never replies holds its thread for ever, so the process does not wait for all threads.
    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
    served
}

async fn until_stopped(config: Config) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let ready_file = config.ready_file.clone();
    let running = app::start(config).await?;
    let url = running.url();
    match (&running.addr, &running.socket) {
        (Some(_), Some(path)) => tell(format_args!("listening on {url} and unix:{}", path.display())),
        _ => tell(format_args!("listening on {url}")),
    }
    if let Some(addr) = &running.s3 {
        let scheme = if running.tls { "https" } else { "http" };
        tell(format_args!("the S3 door listens on {scheme}://{addr}"));
    }
    if let Some(path) = &ready_file {
        // Scripts wait for the file and then read it, clients of other users, too: the URL is no secret.
        let staged = stage_file(path, format!("{url}\n").as_bytes());
        staged.and_then(|staged| staged.with_mode(0o644)?.commit()).with_context(|| {
            format!("cannot write the ready file {}; give another path with --ready-file", path.display())
        })?;
    }
    let stop = running.stop.clone();
    let stopped = running.stopped();
    tokio::pin!(stopped);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = &mut stopped => return Ok(()),
    }
    stop.cancel();
    stopped.await;
    Ok(())
}
