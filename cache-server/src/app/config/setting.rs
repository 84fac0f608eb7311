//! What one setting is.

use super::{Environment, File};

pub(super) struct Setting {
    /// The key in the settings file.
    pub key: &'static str,
    /// The flag. The environment variable is derived from it.
    pub flag: &'static str,
    /// The name of the value in `--help`.
    pub value: &'static str,
    /// The text of `--help`.
    pub help: &'static str,
    /// Returns the value in the settings file.
    pub in_file: fn(&File) -> Option<String>,
    pub default: fn(&Environment) -> String,
}

/// The form of a value in the settings file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    Number,
    /// `true` or `false`.
    Switch,
    /// A list of texts. This character separates them in the flag.
    List(char),
}

impl Setting {
    /// Returns the form of the value in the settings file.
    pub fn form(&self) -> Form {
        match self.value {
            "N" => Form::Number,
            "true|false" => Form::Switch,
            value if value.ends_with("[:DIR]") => Form::List(':'),
            value if value.contains("[,") => Form::List(','),
            _ => Form::Text,
        }
    }

    /// Returns the name of the environment variable: `FLETCH_` and the flag.
    pub fn env(&self) -> String {
        format!("FLETCH_{}", self.flag.to_ascii_uppercase().replace('-', "_"))
    }
}
