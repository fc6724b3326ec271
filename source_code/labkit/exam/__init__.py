# SPDX-License-Identifier: BSD-3-Clause
"""The exam of exam.py: twelve tasks drawn by a seed, their statements, and the judging of answers.

verdicts      name what is wrong with an answer
plans         the plan of a task's configuration, and its configuration in words
predicting    tasks 1 to 4: peak memory and traffic within 5 %
losses        evidence: the losses of a small training, with a fault in it
finding       tasks 5 to 8: the fault in a run's evidence
choosing      tasks 9 to 12: a mesh, a wrapping policy, and formats that fit a budget
tasks         the draw of all twelve by a seed
papers        files: the tasks, the answers, the report, and its recheck
"""
