//! `fletch-simulate`: the simulator by itself; the `fletch` command mounts the same as
//! `fletch simulate`.

use clap::Parser;

fn main() -> anyhow::Result<()> {
    fletch_sim::cli::Cli::parse().run(&mut std::io::stdout().lock())
}
