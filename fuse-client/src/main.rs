//! The program `fletch-mount`: parses the flags, mounts, and returns the exit code.

use clap::Parser;
use fletch_mount::cli::{Action, Cli, LogFormat};
use fletch_mount::keeper::{self, Keeper, WorkerSource};
use fletch_mount::{daemon, datasets, mount, mount_helper, status};
use fletch_store::allocator;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use tracing_subscriber::EnvFilter;

/// The default of `FLETCH_LOG`.
const LOG_DEFAULT: &str = "info";

fn main() -> ExitCode {
    if !allocator::map_from(allocator::TABLES) {
        eprintln!("fletch-mount: cannot configure the allocator: memory use may exceed --memory");
    }
    if let Err(e) = raise_descriptor_limit() {
        eprintln!("fletch-mount: cannot raise the limit of open files: many mounts may not fit: {e}");
    }
    if mount_helper::is_helper(std::env::args_os().next().as_deref()) {
        return as_helper();
    }
    let cli = Cli::parse();
    if let Some(dir) = &cli.status {
        return match status::of(dir) {
            Ok(found) if cli.json => {
                println!("{}", serde_json::json!(found));
                ExitCode::SUCCESS
            }
            Ok(found) => {
                println!("{found}");
                ExitCode::SUCCESS
            }
            Err(e) => complain(&e, ExitCode::FAILURE),
        };
    }
    let background = cli.daemon;
    match cli.hold_settings() {
        Ok(None) => {}
        Ok(Some(settings)) => {
            start_log(cli.log_format.unwrap_or(LogFormat::Text));
            return match keeper::run(WorkerSource::Others(settings)) {
                Ok(code) => ExitCode::from(code),
                Err(e) => complain(&e, ExitCode::FAILURE),
            };
        }
        Err(e) => return complain(&e, ExitCode::from(2)),
    }
    let action = match cli.clone().into_action() {
        Ok(s) => s,
        Err(e) => return complain(&e, ExitCode::from(2)),
    };
    if background && !daemon::is_child() {
        return match daemon::launch(&cli) {
            Ok((text, code)) => {
                eprintln!("{}{text}", if code == 0 { "" } else { "fletch-mount: " });
                ExitCode::from(code)
            }
            Err(e) => {
                eprintln!("fletch-mount: {e:#}");
                ExitCode::FAILURE
            }
        };
    }
    start_log(action.process().log_format);
    let is_worker = Keeper::is_there();
    let outcome = if background && !is_worker { daemon::detach() } else { Ok(()) };
    let run = || match &action {
        action if !is_worker && has_own_keeper(action) => {
            keeper::run(WorkerSource::Own { job: action.process().job.to_string() })
        }
        Action::Mount(settings) => mount::run(settings).map(|()| 0),
        Action::Datasets(settings) => datasets::run(settings).map(|()| 0),
    };
    match outcome.and_then(|()| run()) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            let code = mount::exit_code(&e);
            // Standard error may be a file on a full disk.
            let _unwritten = writeln!(std::io::stderr(), "fletch-mount: {e:#}");
            if background && daemon::report_failed(code, &format!("{e:#}")).is_err() {
                tracing::debug!("the process that started this mount is gone");
            }
            ExitCode::from(code)
        }
    }
}

fn complain(e: &anyhow::Error, code: ExitCode) -> ExitCode {
    eprintln!("fletch-mount: {e:#}");
    code
}

/// Whether this process is to start, and keep for, the one that mounts.
fn has_own_keeper(action: &Action) -> bool {
    let process = action.process();
    process.keeper.is_none() && process.survive != Some(false)
}

/// Lets this process open as many files as it may: each mount is one, and so is each client of a node store.
fn raise_descriptor_limit() -> nix::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
}

/// Becomes `fletch-mount` with the flags that mount(8)'s words mean.
fn as_helper() -> ExitCode {
    let failed = match mount_helper::translate(std::env::args_os().skip(1)) {
        Ok(call) if call.is_fake => return ExitCode::SUCCESS,
        Ok(call) => std::env::current_exe()
            .map_or_else(|e| e, |program| Command::new(program).arg0("fletch-mount").args(call.args).exec())
            .to_string(),
        Err(e) => e.to_string(),
    };
    eprintln!("{}: {failed}", mount_helper::HELPER);
    // mount(8): "incorrect invocation or permissions".
    ExitCode::from(1)
}

fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_env("FLETCH_LOG").unwrap_or_else(|_| EnvFilter::new(LOG_DEFAULT));
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A line that finds no room is lost. Reported, it would be a panic: standard error is on that disk, too.
    let log = log.log_internal_errors(false);
    match format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
}
