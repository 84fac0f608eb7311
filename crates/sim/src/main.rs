//! `fletch-simulate`: the simulator as a program of its own. `fletch simulate` runs the same code.

use clap::Parser;

fn main() -> anyhow::Result<()> {
    fletch_sim::cli::Cli::parse().run(&mut std::io::stdout().lock())
}
