//! The `fletch` binary: parses the command line and runs the command.

use fletch::cli::words::{Unparsed, parse};
use std::process::ExitCode;

fn main() -> ExitCode {
    match parse(std::env::args_os()) {
        Ok(cli) => ExitCode::from(fletch::cmd::run(cli) as u8),
        Err(Unparsed::Clap(error)) => error.exit(),
        Err(Unparsed::Word(failure)) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.exit as u8)
        }
    }
}
