//! Writes the manual pages and the completions of the programs, from their command lines.
//!
//! `fletch-manuals DIR` fills `DIR/man/man1`, `DIR/man/man8` and `DIR/completions/{bash,zsh,fish}`. The page
//! `mount.fletch.8` is written by hand: that name of the program takes the words of mount(8).

use anyhow::{Context as _, bail};
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The manual page of `mount.fletch`.
const MOUNT_HELPER: &str = include_str!("../../man/mount.fletch.8");

/// Where the completions of a shell go, and how their files are named.
type FileOf = fn(&str) -> String;
const SHELLS: [(Shell, &str, FileOf); 3] = [
    (Shell::Bash, "bash", |program| program.to_owned()),
    (Shell::Zsh, "zsh", |program| format!("_{program}")),
    (Shell::Fish, "fish", |program| format!("{program}.fish")),
];

fn main() -> anyhow::Result<()> {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let [dir] = &words[..] else { bail!("usage: fletch-manuals DIR") };
    write_all(Path::new(dir))
}

/// Writes everything below a directory.
fn write_all(dir: &Path) -> anyhow::Result<()> {
    let programs = [
        (fletch::cli::help::command(), "1"),
        (fletch_mount::cli::Cli::command(), "1"),
        (fletch_server::config::command(), "8"),
    ];
    for (command, section) in programs {
        let name = command.get_name().to_owned();
        for (shell, folder, file) in SHELLS {
            let path = place(dir, &["completions", folder], &file(&name))?;
            let mut out = Vec::new();
            clap_complete::generate(shell, &mut command.clone(), &name, &mut out);
            fs::write(&path, out).with_context(|| path.display().to_string())?;
        }
        let mut command = command.disable_help_subcommand(true);
        command.build();
        write_pages(dir, &command, &name, section)?;
    }
    let path = place(dir, &["man", "man8"], "mount.fletch.8")?;
    fs::write(&path, MOUNT_HELPER).with_context(|| path.display().to_string())
}

/// Writes the page of a command, and one for each command below it: `fletch-index.1`.
fn write_pages(dir: &Path, command: &Command, name: &str, section: &str) -> anyhow::Result<()> {
    let path = place(dir, &["man", &format!("man{section}")], &format!("{name}.{section}"))?;
    let mut out = Vec::new();
    Man::new(command.clone()).title(name).section(section).render(&mut out)?;
    fs::write(&path, out).with_context(|| path.display().to_string())?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(dir, sub, &format!("{name}-{}", sub.get_name()), section)?;
    }
    Ok(())
}

/// Returns the path of a file in a folder, which is made if it does not exist.
fn place(dir: &Path, folder: &[&str], file: &str) -> anyhow::Result<PathBuf> {
    let folder = folder.iter().fold(dir.to_owned(), |dir, name| dir.join(name));
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(file))
}
