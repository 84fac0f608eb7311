//! How `--help` looks: an example first, the global options last, one screen for each command.
//!
//! A command states its examples and its notes in one text, `after_help`, which begins with `Example`. This
//! file moves the examples to the top.

use super::Cli;
use clap::builder::{Resettable, StyledStr};
use clap::{Command, CommandFactory};

/// The order of the parts of a command's help.
const TEMPLATE: &str = "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";
/// The same for `fletch` itself, whose global options are in its notes.
const TOP: &str =
    "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\nCommands:\n{subcommands}{after-help}";
/// Options of `index` that `pack` takes without listing them.
const HIDDEN_IN_PACK: [&str; 7] =
    ["list", "samples", "sample_rule", "symlinks", "one_file_system", "keep_going", "skip_failed"];

/// Returns the command line of `fletch`, with the help of each command arranged.
#[must_use]
pub fn command() -> Command {
    let top = Cli::command().mut_subcommands(arranged);
    let top = top.mut_subcommand("pack", |pack| {
        HIDDEN_IN_PACK.iter().fold(pack, |pack, id| pack.mut_arg(id, |arg| arg.hide(true)))
    });
    examples_first(top).help_template(TOP)
}

fn arranged(command: Command) -> Command {
    let command = examples_first(command).mut_subcommands(arranged);
    // Only a help with notes ends its last line.
    let end = if command.get_after_help().is_some() { "" } else { "\n" };
    command.help_template(format!("{TEMPLATE}{end}"))
}

/// Moves the examples of a command before its usage.
fn examples_first(command: Command) -> Command {
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    if !text.starts_with("Example") {
        return command;
    }
    let (examples, notes) = text.split_once("\n\n").unwrap_or((&text, ""));
    let notes = Resettable::from((!notes.is_empty()).then(|| StyledStr::from(notes.to_owned())));
    command.before_help(examples.to_owned()).after_help(notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of a screen, and its columns.
    const SCREEN: (usize, usize) = (40, 100);

    fn check(mut command: Command, name: &str, faults: &mut Vec<String>) {
        let text = command.render_help().to_string();
        let lines: Vec<&str> = text.lines().collect();
        let widest = lines.iter().map(|l| l.chars().count()).max().unwrap_or(0);
        if lines.len() > SCREEN.0 || widest > SCREEN.1 {
            faults.push(format!("{name}: {} lines, {widest} columns\n{text}", lines.len()));
        }
        let at = |what: &str| text.find(what).unwrap_or(usize::MAX);
        let apart = at("\nGlobal options");
        let in_order = at("\nExample") < at("\nUsage:") && at("\nUsage:") < apart;
        if !in_order || apart == usize::MAX || text[apart..].contains("\nOptions:") {
            faults.push(format!("{name}: not an example, the usage, and the global options last\n{text}"));
        }
        for sub in command.clone().get_subcommands() {
            check(sub.clone(), &format!("{name} {}", sub.get_name()), faults);
        }
    }

    #[test]
    fn the_help_of_each_command_is_one_screen_with_an_example_first() {
        let mut top = command().term_width(SCREEN.1);
        top.build();
        let mut faults = Vec::new();
        check(top, "fletch", &mut faults);
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}
