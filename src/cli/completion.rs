//! Implements the `completion` command: generates the script from the definition of the command line.

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;

use super::Cli;
use crate::runtime::lifecycle::BoxError;

#[derive(Args, Clone, Debug)]
pub struct CompletionFlags {
    /// Shell: bash, zsh, fish or powershell.
    #[arg(value_name = "SHELL", value_parser = shell)]
    shell: Option<Shell>,
}

pub fn script(flags: &CompletionFlags) -> String {
    let Some(shell) = flags.shell else {
        return CompletionFlags::augment_args(Command::new("pilot-agent completion"))
            .render_help()
            .to_string();
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "pilot-agent", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

fn shell(name: &str) -> Result<Shell, BoxError> {
    match name.parse() {
        Ok(Shell::Elvish) | Err(_) => Err("expected bash, zsh, fish or powershell".into()),
        Ok(shell) => Ok(shell),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_has_a_completion_script_with_the_commands() {
        for name in ["bash", "zsh", "fish", "powershell"] {
            let shell = shell(name).expect("a shell");
            let script = script(&CompletionFlags { shell: Some(shell) });
            for command in ["proxy", "request", "wait", "version"] {
                assert!(script.contains(command), "{name}: {command}");
            }
        }
        assert!(shell("csh").is_err());
    }
}
