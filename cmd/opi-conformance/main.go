// SPDX-License-Identifier: Apache-2.0

// Command opi-conformance tests whether an OPI network agent keeps the contract of OPI's API. See
// docs/how-to/test-an-opi-agent.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// Exit codes, as grep and diff have them.
const (
	exitNo     = 1 // the agent does not conform, as far as was tested
	exitFailed = 2 // there is no answer
)

// errNo is returned by a run in which a case did not pass, and which has printed why.
var errNo = errors.New("the agent does not conform")

// options are the values of the flags.
type options struct {
	endpoint                  string
	ca, cert, key, serverName string
	plaintext                 bool

	commands       conformance.Commands
	ports          []string
	logicalBridges []string
	prefix         string
	vlans, vnis    string
	vtep           string

	profiles    []string
	run         string
	list, quiet bool
	settle      time.Duration
	callTimeout time.Duration
	limit       time.Duration
	scale       int

	implementation conformance.Implementation
	junit, report  string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	c := command(os.Args)
	c.SetOut(terminal.NewWriter(os.Stdout))
	err := c.ExecuteContext(ctx)
	stop()

	switch {
	case errors.Is(err, errNo):
		os.Exit(exitNo)
	case err != nil:
		fmt.Fprintln(os.Stderr, "opi-conformance:", terminal.Escape(err.Error()))
		os.Exit(exitFailed)
	}
}

// command returns the command. argv is the command line that reports show.
func command(argv []string) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "opi-conformance",
		Short: "Test whether an OPI network agent keeps the contract of OPI's API",
		Long: `opi-conformance calls an OPI network agent as any client does, and compares what it does with the comments of OPI's
proto files and with Google's API Improvement Proposals, which OPI's API follows. Each case is one sentence of these.

It makes logical bridges, bridge ports, VRFs and SVIs whose ids begin with a prefix of the run, and deletes them again,
also after Ctrl-C. It changes nothing else. Run it against an agent that serves no pods, because a test can find that
the agent ends.

What the agent does not serve is skipped and never passed. With --profiles the vendor claims profiles: then it fails.

Exit codes: 0 if no case failed, 1 if one did or could not be decided, 2 for bad input and an agent that does not answer.`,
		Example: `  # What can be tested without interfaces and restarts, at an agent without TLS.
  opi-conformance --endpoint 127.0.0.1:50151 --plaintext

  # Everything, as a vendor publishes it. The hooks are programs of the vendor.
  opi-conformance --endpoint dpu:50151 --ca ca.crt --cert client.crt --key client.key \
    --make-port ./make-port --remove-port ./remove-port --restart-agent ./restart-agent \
    --implementation acme-agent --implementation-version v1.2.3 --report report.json --junit report.xml

  # An agent whose ports are functions of a card, with the MAC addresses that these have.
  opi-conformance --endpoint unix:/run/agent.sock --plaintext --ports c1pf0vf0=02:11:22:33:44:00,c1pf0vf1=02:11:22:33:44:01

  # An agent that serves Create and Delete of ports only, and takes VLAN ids as logical bridges.
  opi-conformance --endpoint 192.168.1.2:8085 --plaintext --profiles BLIND --ports host0-1 --logical-bridges 3

  # One case again, and the list of all.
  opi-conformance --endpoint 127.0.0.1:50151 --plaintext --run L2-CORE/bridge-port/deleted-is-gone
  opi-conformance --list`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Version: version.String(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.execute(cmd.Context(), argv, cmd.OutOrStdout())
		},
	}

	f := cmd.Flags()
	f.SortFlags = false
	o.addAgentFlags(f)
	o.addObjectFlags(f)
	o.addRunFlags(f)
	cmd.AddCommand(wireCommand())
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.MarkFlagsRequiredTogether("cert", "key")
	cmd.MarkFlagsMutuallyExclusive("ca", "plaintext")

	return cmd
}

// addAgentFlags adds the flags that say where the agent is and what can be done to it.
func (o *options) addAgentFlags(f *pflag.FlagSet) {
	f.StringVar(&o.endpoint, "endpoint", "",
		"`address` of the agent, host:port or unix:/path")
	f.StringVar(&o.ca, "ca", "", "PEM `file` with the authorities of the agent's certificate")
	f.StringVar(&o.cert, "cert", "", "PEM `file` with the client's certificate chain")
	f.StringVar(&o.key, "key", "", "PEM `file` with the key of --cert")
	f.StringVar(&o.serverName, "server-name", "",
		"`name` in the agent's certificate; empty: the host of --endpoint")
	f.BoolVar(&o.plaintext, "plaintext", false, "connect without TLS")

	f.StringVar(&o.commands.MakePort, "make-port", "", "`command` that makes the interface of the "+
		"port "+conformance.EnvPortID+" with the MAC address "+conformance.EnvPortMAC+", and "+
		"succeeds if there is one. It is split at blanks and run without a shell, as the next three "+
		"are")
	f.StringVar(&o.commands.RemovePort, "remove-port", "",
		"`command` that removes what --make-port made, and succeeds if there is nothing")
	f.StringVar(&o.commands.Wire, "wire", "", "`command` that passes the frames of the port "+
		"from and to its interface, as \"opi-conformance wire\" does, until its input ends")
	f.StringVar(&o.commands.Restart, "restart-agent", "", "`command` that sends the agent's process "+
		"the signal "+conformance.EnvSignal+" (TERM or KILL), waits for its end, and starts the "+
		"agent again")
	f.DurationVar(&o.commands.Timeout, "hook-timeout", 30*time.Second,
		"how long such a command may take")
}

// addObjectFlags adds the flags that say what objects may be like.
func (o *options) addObjectFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&o.ports, "ports", nil, "`ports` that may be made, as id or id=MAC; for "+
		"agents whose ports are functions of a card; some cases need 4, those of SCALE more; "+
		"empty: ids of the run")
	f.StringSliceVar(&o.logicalBridges, "logical-bridges", nil, "`names` of logical bridges for "+
		"ports, for agents that serve no LogicalBridgeService")
	f.StringVar(&o.prefix, "prefix", "", "`text` that all ids of the run begin with, 4-8 "+
		"characters of a-z and 0-9; empty: one by chance")
	f.StringVar(&o.vlans, "vlans", "3000-3199",
		"`range` of VLAN ids that may be used; what is in use at the agent is left out")
	f.StringVar(&o.vnis, "vnis", "16000000-16000199", "`range` of VNIs that may be used, likewise")
	f.StringVar(&o.vtep, "vtep", "",
		"`address` of the xPU for VXLAN tunnels with its prefix length, such as 198.51.100.1/24")
	f.IntVar(&o.scale, "scale", 32, "how many objects the cases of SCALE make")
}

// addRunFlags adds the flags that say what is run and what is written.
func (o *options) addRunFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&o.profiles, "profiles", nil, fmt.Sprintf("`profiles` that the vendor claims, "+
		"of %s: only they are run, and fail where the agent does not serve them; empty: all are "+
		"run, and skipped where it does not", profileList()))
	f.StringVar(&o.run, "run", "", "`regexp` of the names of cases that are run")
	f.BoolVar(&o.list, "list", false, "list the cases and run none")
	f.BoolVar(&o.quiet, "quiet", false, "print no cases that passed or were skipped")
	f.DurationVar(&o.settle, "settle", 10*time.Second,
		"how long the agent may take until an object is up or gone")
	f.DurationVar(&o.callTimeout, "call-timeout", 10*time.Second, "how long a call may take")
	f.DurationVar(&o.limit, "limit", 5*time.Minute,
		"how long the run may take; what is not run then is said")

	f.StringVar(&o.implementation.Name, "implementation", "", "`name` of the agent, for the report")
	f.StringVar(&o.implementation.Version, "implementation-version", "",
		"`version` of the agent, for the report")
	f.StringVar(&o.implementation.URL, "implementation-url", "",
		"`address` of the agent's project, for the report")
	f.StringVar(&o.report, "report", "", "`file` for the report, as JSON")
	f.StringVar(&o.junit, "junit", "", "`file` for the results, as JUnit's XML")
}

// writeFile writes a file that only its owner can change.
func writeFile(name string, write func(io.Writer) error) error {
	if name == "" {
		return nil
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := errors.Join(write(file), file.Close()); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
