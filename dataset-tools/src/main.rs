//! The `fletch` binary: parses the command line and runs the command.

use clap::Parser;
use fletch::cli::Cli;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    ExitCode::from(fletch::cmd::run(cli) as u8)
}
