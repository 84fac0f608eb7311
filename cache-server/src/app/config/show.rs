//! Shows the settings in force in the form of a settings file.

use super::{Config, EffectiveSetting, setting::Form};
use fletch_origin::OriginConfig;
use serde::Serialize;
use toml::Value;

/// The widest column of keys and values. The sources of longer ones are not aligned.
const COLUMN_MAX: usize = 60;

/// The `[[origin]]` tables of a settings file.
#[derive(Serialize)]
struct OriginTables<'a> {
    origin: &'a [OriginConfig],
}

impl EffectiveSetting {
    /// Returns the value as the settings file has it.
    fn in_toml(&self) -> Value {
        match self.form {
            Form::Text => Value::from(self.value.as_str()),
            // A number that does not parse is a fault, which is reported before anything is shown.
            Form::Number => {
                self.value.parse::<i64>().map_or_else(|_| self.value.as_str().into(), Value::from)
            }
            Form::Switch => {
                self.value.parse::<bool>().map_or_else(|_| self.value.as_str().into(), Value::from)
            }
            Form::List(separator) => {
                Value::Array(self.value.split(separator).filter(|v| !v.is_empty()).map(Value::from).collect())
            }
        }
    }
}

impl Config {
    /// Returns the settings in force, one on each line: `key = value  # source`.
    ///
    /// A server that reads the text as its settings file has the same settings.
    #[must_use]
    pub fn show(&self) -> String {
        let lines: Vec<_> =
            self.effective.iter().map(|e| (format!("{} = {}", e.key, e.in_toml()), &e.source)).collect();
        let wide = lines.iter().map(|(line, _)| line.len()).max().unwrap_or(0).min(COLUMN_MAX);
        let mut out = String::new();
        for (line, source) in lines {
            // The path of a file may hold a line break, which would end the comment.
            let source = source.to_string().replace(char::is_control, "?");
            out.push_str(&format!("{line:wide$}  # {source}\n"));
        }
        if !self.origins.is_empty() {
            match toml::to_string(&OriginTables { origin: &self.origins }) {
                Ok(tables) => out.push_str(&format!("\n{tables}")),
                Err(e) => out.push_str(&format!("\n# the [[origin]] tables cannot be shown: {e}\n")),
            }
        }
        out
    }
}
