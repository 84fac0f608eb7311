//! A table of text with aligned columns.

use std::fmt::Write as _;

/// How a column is aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextTable {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// Returns a table without rows.
    #[must_use]
    pub fn new(columns: &[(&'static str, Align)]) -> Self {
        TextTable { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row of as many cells as the table has columns. Control characters become spaces.
    pub fn push(&mut self, cells: impl IntoIterator<Item = String>) {
        let clean = |cell: String| cell.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.rows.push(cells.into_iter().map(clean).collect());
    }

    /// Returns whether the table has no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the lines of the table: its head, at most `rows_max` rows, and how many are left out.
    #[must_use]
    pub fn render(&self, rows_max: usize) -> String {
        let shown = &self.rows[..self.rows.len().min(rows_max)];
        let width = |column: usize| {
            let cells = shown.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
            cells.chain([self.columns[column].0.len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut out = String::new();
        let head: Vec<String> = self.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        for row in std::iter::once(&head).chain(shown) {
            let mut line = String::new();
            for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(&self.columns) {
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                match align {
                    Align::Left => line.extend(["  ", cell, &pad]),
                    Align::Right => line.extend(["  ", &pad, cell]),
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        let left = self.rows.len() - shown.len();
        if left > 0 {
            let _infallible = writeln!(out, "  … {left} more; --json has all");
        }
        out
    }
}
