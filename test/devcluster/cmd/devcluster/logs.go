// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

func logsCommand(o *options) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs [COMPONENT]",
		Short: "Print the log of a component; without one, list the components",
		Example: `  devcluster logs
  devcluster logs kube-apiserver
  devcluster logs -f node1/kubelet`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := o.store()
			if err != nil {
				return err
			}

			// Logs are useful even after the cluster has ended.
			dir, _, err := store.Load(o.name)
			if err != nil {
				return err
			}

			logs, err := findLogs(dir)
			if err != nil {
				return err
			}

			if len(args) == 0 {
				for _, name := range sortedNames(logs) {
					fmt.Println(name)
				}
				return nil
			}

			file, ok := logs[args[0]]
			if !ok {
				return fmt.Errorf("no log %q: there are %s", args[0],
					strings.Join(sortedNames(logs), ", "))
			}

			return printLog(cmd.Context(), os.Stdout, file, follow)
		},
	}

	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what is added")
	return o.nameFlag(cmd)
}

// findLogs returns the log files of a cluster by component: etcd, audit, node1/kubelet, ...
func findLogs(dir state.Dir) (map[string]string, error) {
	logs := map[string]string{}
	for prefix, pattern := range map[string]string{
		"":       filepath.Join(dir.Logs(), "*.log"),
		"nodes/": filepath.Join(string(dir), "nodes", "*", "log", "*.log"),
	} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}

		for _, f := range files {
			name := strings.TrimSuffix(filepath.Base(f), ".log")
			if prefix != "" {
				name = filepath.Base(filepath.Dir(filepath.Dir(f))) + "/" + name
			}
			logs[name] = f
		}
	}

	return logs, nil
}

func sortedNames(logs map[string]string) []string {
	names := make([]string, 0, len(logs))
	for name := range logs {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func printLog(ctx context.Context, out io.Writer, file string, follow bool) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()

	if !follow {
		_, err := io.Copy(out, f)
		return err
	}

	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()

	if err := watcher.Add(file); err != nil {
		return err
	}

	for {
		if _, err := io.Copy(out, f); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-watcher.Errors:
			return err
		case e := <-watcher.Events:
			if e.Has(fsnotify.Remove) {
				return nil
			}
		}
	}
}
